// Parts of the parsers that chat, completions and /generate share. Internal to api/.
#pragma once

#include <string_view>

#include "api/json_reader.h"
#include "api/requests.h"

namespace sluice::api_internal {

// The fields that generation_config.json has too, in the same ranges: what is absent stays as it is.
void ReadDefaults(FieldReader& f, SamplingDefaults* out);
// temperature, top_p, ..., stop, seed, logit_bias, n, min_tokens, ignore_eos: the same names in all three.
void ReadSampling(FieldReader& f, const ApiLimits& limits, const SamplingDefaults& defaults,
                  int32_t stops_max, GenerationOptions* out);
// stream, stream_options, model, rid, cache_salt, priority, timeout, ...
// The room that a router gave it, and how long it may take.
void ReadCourse(FieldReader& f, const ApiLimits& limits, GenerationOptions* out);
void ReadEnvelope(FieldReader& f, const ApiLimits& limits, GenerationOptions* out);
void ReadMaxTokens(FieldReader& f, std::initializer_list<std::string_view> names, GenerationOptions* out);
// response_format, json_schema, regex, ebnf, guided_*, structured_outputs, whitespace.
void ReadConstraint(FieldReader& f, GenerationOptions* out);
// Fields that would change the answer and that this server cannot honour: refused by name unless they say
// "nothing".
void RefuseUnsupported(FieldReader& f, std::initializer_list<std::string_view> names);
// messages, checked and copied; and chat_template_kwargs, reasoning_effort, add_generation_prompt.
void ReadMessages(FieldReader& f, const ApiLimits& limits, nlohmann::ordered_json* messages,
                  nlohmann::ordered_json* kwargs, bool* add_generation_prompt);
// tools, tool_choice, parallel_tool_calls, separate_reasoning, stream_reasoning.
void ReadTools(FieldReader& f, const ApiLimits& limits, ChatRequest* out);
// The name of a function that calls can be read back from; false: f has the error.
bool CheckToolName(FieldReader& f, const ApiLimits& limits, std::string_view field, std::string_view name);
// A string, a list of strings, a list of ids or a list of lists of ids.
void ReadPrompts(FieldReader& f, std::string_view name, const ApiLimits& limits,
                 std::vector<PromptInput>* out, bool* batch);
void CheckTotals(FieldReader& f, const ApiLimits& limits, size_t prompts, int32_t n);

}  // namespace sluice::api_internal
