// What a model writes, cut into pieces: reasoning and tool calls come out the same however it is cut.
#include "fuzz_target.h"
#include "text/response_parser.h"

using namespace sluice;

namespace {

std::string Run(std::string_view text, size_t piece) {
  ResponseParser::Options options;
  options.reasoning = ReasoningStyle::kThinkTags;
  options.tools = ParseToolCallStyle("glm47").value_or(ToolCallStyle::kNone);
  if (options.tools == ToolCallStyle::kNone)
    options.tools = ParseToolCallStyle("glm45").value_or(ToolCallStyle::kNone);
  options.declared_tools = nlohmann::ordered_json::parse(
      R"([{"type":"function","function":{"name":"get","parameters":{"type":"object","properties":{"n":{"type":"integer"}}}}},{"type":"function","function":{"name":"get_weather","parameters":{}}}])");
  ResponseParser parser(options);
  std::string out[3];
  const auto take = [&](const std::vector<ResponseEvent>& events) {
    for (const ResponseEvent& e : events) {
      if (e.kind == ResponseEvent::Kind::kReasoning) out[0] += e.text;
      if (e.kind == ResponseEvent::Kind::kContent) out[1] += e.text;
      if (e.kind == ResponseEvent::Kind::kToolBegin) out[2] += "\n" + e.id + e.text + " ";
      if (e.kind == ResponseEvent::Kind::kToolArguments) out[2] += e.text;
    }
  };
  for (size_t at = 0; at < text.size(); at += piece) take(parser.Feed(text.substr(at, piece)));
  take(parser.Finish());
  return out[0] + "\1" + out[1] + "\1" + out[2];
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  return {
      "<think>a</think>ok<tool_call>get_weather\n<arg_key>p</arg_key>\n<arg_value>C:\\a\\worker.js</"
      "arg_value>\n</tool_call>",
      "<tool_call>get<arg_key>n</arg_key><arg_value>5</arg_value></tool_call> and "
      "<tool_call>get\n</tool_call>",
      "plain é text"};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (size > 4096) return 0;
  const std::string whole = Run(text, size + 1);
  if (Run(text, 1) != whole || Run(text, 7) != whole) __builtin_trap();
  return 0;
}
