// Any answer, cut anywhere: the pieces add up to the same events as the whole, and nothing of the text is
// lost.
#include <string>
#include <vector>

#include "base/check.h"
#include "nlohmann/json.hpp"
#include "text/response_parser.h"

extern const char* const kFuzzWords[] = {"<think>",
                                         "</think>",
                                         "<tool_call>",
                                         "</tool_call>",
                                         "<arg_key>",
                                         "</arg_key>",
                                         "<arg_value>",
                                         "</arg_value>",
                                         "get",
                                         "\n",
                                         "<｜tool▁calls▁begin｜>",
                                         "<｜tool▁calls▁end｜>",
                                         "<｜tool▁call▁begin｜>",
                                         "<｜tool▁call▁end｜>",
                                         "<｜tool▁sep｜>",
                                         "function",
                                         "```json\n",
                                         "\n```",
                                         "{\"a\": 1}",
                                         "{}",
                                         "<｜DSML｜function_calls>\n",
                                         "</｜DSML｜function_calls>",
                                         "<｜DSML｜invoke name=\"get\">\n",
                                         "</｜DSML｜invoke>\n",
                                         "<｜DSML｜parameter name=\"s\" string=\"true\">",
                                         "</｜DSML｜parameter>",
                                         "string=\"false\">",
                                         " ",
                                         "x",
                                         "é"};
extern const size_t kFuzzWordCount = std::size(kFuzzWords);

namespace sluice {
namespace {

std::vector<ResponseEvent> Joined(std::vector<ResponseEvent> events) {
  std::vector<ResponseEvent> out;
  for (ResponseEvent& e : events) {
    const bool text = e.kind == ResponseEvent::Kind::kContent || e.kind == ResponseEvent::Kind::kReasoning;
    if (text && !out.empty() && out.back().kind == e.kind) {
      out.back().text += e.text;
    } else {
      out.push_back(std::move(e));
    }
  }
  return out;
}

std::vector<ResponseEvent> Parse(const ResponseParser::Options& options, std::string_view text,
                                 size_t piece) {
  ResponseParser parser(options);
  std::vector<ResponseEvent> events;
  const auto add = [&](std::vector<ResponseEvent> more) {
    events.insert(events.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  };
  for (size_t at = 0; at < text.size(); at += piece) add(parser.Feed(text.substr(at, piece)));
  add(parser.Finish());
  int begun = 0;
  for (const ResponseEvent& e : events) {
    if (e.kind == ResponseEvent::Kind::kToolBegin) {
      SLUICE_CHECK(e.tool_index == begun && !e.text.empty(), "call {} of {}", e.tool_index, begun);
      ++begun;
    }
    if (e.kind == ResponseEvent::Kind::kToolArguments) {
      SLUICE_CHECK(nlohmann::json::parse(e.text, nullptr, false).is_object(), "arguments: {}", e.text);
    }
  }
  SLUICE_CHECK(begun == parser.tool_calls_sent(), "{} calls, {} said", begun, parser.tool_calls_sent());
  return Joined(std::move(events));
}

}  // namespace
}  // namespace sluice

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sluice;
  if (size < 1) return 0;
  static const auto tools = nlohmann::ordered_json::parse(
      R"([{"type":"function","function":{"name":"get","parameters":{"properties":{"s":{"type":"string"}}}}}])");
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  ResponseParser::Options options;
  options.tools = ToolCallStyle(data[0] % 5);
  options.reasoning = (data[0] & 8) != 0 ? ReasoningStyle::kThinkTags : ReasoningStyle::kNone;
  options.starts_in_reasoning = (data[0] & 16) != 0;
  options.declared_tools = tools;
  const auto whole = Parse(options, text, std::max<size_t>(1, text.size()));
  for (const size_t piece : {size_t(1), size_t(2), size_t(3), size_t(1 + data[0] % 13)}) {
    const auto cut = Parse(options, text, piece);
    SLUICE_CHECK(cut.size() == whole.size(), "{} events, {} when cut by {}", whole.size(), cut.size(), piece);
    for (size_t i = 0; i < cut.size(); ++i) {
      SLUICE_CHECK(cut[i].kind == whole[i].kind && cut[i].text == whole[i].text,
                   "event {} differs when cut by {}", i, piece);
    }
  }
  return 0;
}
