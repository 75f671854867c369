// Workloads of `sluice bench serving` that come from files: conversations (ShareGPT's form) and traces of
// request lengths with shared prefixes (Mooncake's form).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "serving_load.h"

namespace sluice {

// Token ids of texts, by whoever has the tokenizer (the server).
using TokenizeTexts =
    std::function<StatusOr<std::vector<std::vector<int32_t>>>(const std::vector<std::string>&)>;

struct ConversationOptions {
  int64_t num_prompts = 100;
  int64_t output_len = 0;   // of every answer; 0: as long as the answer in the file
  int64_t context_len = 0;  // prompt and answer together are at most this; 0: no limit
  uint64_t seed = 1;
};

// A JSON list of {"conversations": [{"value": prompt}, {"value": answer}, ...]} (also under "conversation",
// texts also under "content"). The first two turns of conversations in an order drawn with the seed; prompts
// or answers of fewer than two tokens are passed over, as are those that do not fit. Fewer than num_prompts
// when the file has no more.
StatusOr<std::vector<LoadRequest>> ConversationWorkload(const std::string& path,
                                                        const ConversationOptions& options,
                                                        const TokenizeTexts& tokenize);

struct TraceOptions {
  int64_t num_prompts = 0;  // 0: the whole trace
  double slowdown = 1;      // of the arrival times; 0: all at once
  int64_t context_len = 0;  // longer requests are passed over; 0: none is
  int32_t vocab_size = 0;
};

// Lines of {"timestamp" ms, "input_length", "output_length", "hash_ids"}; equal ids at equal places make
// equal tokens.
StatusOr<std::vector<LoadRequest>> TraceWorkload(const std::string& path, const TraceOptions& options);

}  // namespace sluice
