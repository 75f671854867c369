// Request bodies of every endpoint.
#include "api/generation_config.h"
#include "api/requests.h"
#include "fuzz_target.h"
#include "nlohmann/json.hpp"

using namespace sluice;

std::vector<std::string> FuzzSeeds() {
  return {
      R"({"messages":[{"role":"system","content":[{"type":"text","text":"a"}]},{"role":"user","content":"é"},{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":"{\"x\":1}"}}]}],"temperature":0.5,"stream":true,"stream_options":{"include_usage":true},"logprobs":true,"top_logprobs":2,"n":2,"stop":["a","b"],"seed":5})",
      R"({"model":"m","max_tokens":5,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":[{"type":"text","text":"q"}]},{"role":"assistant","content":[{"type":"thinking","thinking":"t"},{"type":"tool_use","id":"i","name":"f","input":{"x":1}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"i","content":"42"}]}],"tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"any"},"thinking":{"type":"enabled"},"stop_sequences":["x"],"stream":true})",
      R"({"messages":[{"role":"user","content":"q"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"tool_choice":{"type":"function","function":{"name":"f"}},"parallel_tool_calls":false,"response_format":{"type":"json_schema","json_schema":{"schema":{"type":"object"}}},"chat_template_kwargs":{"enable_thinking":false}})",
      R"({"prompt":["a","b"],"max_tokens":5,"echo":true,"logprobs":1,"logit_bias":{"5":-1},"top_p":0.9})",
      R"({"prompt":[[1,2],[3]],"best_of":1,"min_p":0.1,"presence_penalty":-1})",
      R"({"text":["a","b"],"sampling_params":[{"max_new_tokens":4,"stop_token_ids":[1]},{"ignore_eos":true}],"return_logprob":true,"rid":["x","y"]})",
      R"({"input_ids":[1,2,3],"sampling_params":{"temperature":0},"stream":true})",
      R"({"tokens":[[1,2],[3]],"skip_special_tokens":false})",
      R"({"rid":"x","abort_all":false})"};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  ApiLimits limits;
  limits.vocab_size = 1000;
  limits.context_length = 4096;
  const SamplingDefaults defaults;
  const auto check = [](const std::optional<ApiError>& error) {
    // An error is text that a JSON writer takes, and never empty.
    if (!error) return;
    if (error->message.empty() || error->http_status < 400) __builtin_trap();
    nlohmann::ordered_json(error->message).dump();
  };
  ChatRequest chat;
  check(ParseChat(body, limits, defaults, &chat));
  ChatRequest messages;
  check(ParseMessages(body, limits, defaults, body.size() % 2 == 0, &messages));
  CompletionRequest completion;
  check(ParseCompletion(body, limits, defaults, &completion));
  NativeRequest native;
  check(ParseNative(body, limits, defaults, &native));
  TokenizeRequest tokenize;
  check(ParseTokenize(body, limits, &tokenize));
  DetokenizeRequest detokenize;
  check(ParseDetokenize(body, limits, &detokenize));
  AbortRequest abort;
  check(ParseAbort(body, limits, &abort));
  (void)ReadGenerationConfig(body).ok();
  return 0;
}
