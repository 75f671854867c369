// How a model family writes tool calls, as resumable matchers: text may arrive cut anywhere.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "nlohmann/json.hpp"

namespace sluice {

enum class ToolCallStyle {
  kNone,
  kGlm,         // <tool_call>name\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>; line breaks
                // optional (4.5 to 5)
  kDeepseekV3,  // <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n{...}\n```<｜tool▁call▁end｜>...
  kDeepseekV31,  // <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>
  kDeepseekV32,  // <｜DSML｜function_calls>\n<｜DSML｜invoke name="n">\n<｜DSML｜parameter name="k"
                 // string="true">v</｜DSML｜parameter>...
};

struct ToolCall {
  std::string name;
  std::string arguments;  // a JSON object's text
};

// One section of calls, from behind its begin marker on. A call counts only when its end has been seen.
class ToolCallMatcher {
 public:
  enum class Result {
    kMore,  // all of it may belong to a call
    kCall,  // call() is complete; the text up to position() is used up
    kEnd,   // the section is over at position()
    kFail,  // the text at position() cannot belong to a call
  };
  // tools: the request's tools in OpenAI form; their parameter types decide whether 5 is a number or a string
  // where the format does not say.
  static std::unique_ptr<ToolCallMatcher> Create(ToolCallStyle style, const nlohmann::ordered_json& tools);
  virtual ~ToolCallMatcher() = default;

  virtual std::string_view begin_marker() const = 0;
  // Tokens of the format that a detokenizer must not skip as special.
  virtual std::vector<std::string_view> marker_tokens() const = 0;
  // True after a kCall that ends the section (formats without a section of their own).
  virtual bool one_call_a_section() const = 0;

  void Reset();  // to the beginning of a section
  // text: the section's text not yet used up; it grows from call to call. After kCall, drop position() bytes
  // of it.
  Result Step(std::string_view text);
  size_t position() const { return position_; }
  const ToolCall& call() const { return call_; }

 protected:
  enum class Found { kYes, kNo, kMore };
  virtual Result Advance(std::string_view text) = 0;
  virtual void Restart() = 0;

  void SkipSpace(std::string_view text);
  // The literal at position_; steps over it if it is there.
  Found Literal(std::string_view text, std::string_view literal);
  // A function's name, complete only when something else follows.
  Found Name(std::string_view text, std::string* name);
  // Text up to `end`, which is stepped over. Linear over repeated calls with growing text.
  Found Until(std::string_view text, std::string_view end, std::string* out);

  size_t position_ = 0;
  size_t searched_ = 0;        // Until's end marker does not begin before this
  bool call_dropped_ = false;  // the caller dropped the last call's text
  ToolCall call_;
};

// "glm45", "glm47", "glm" / "deepseekv3", "deepseekv31", "deepseekv32" / "none".
StatusOr<ToolCallStyle> ParseToolCallStyle(std::string_view name);
// What a checkpoint of this architecture (config.json's architectures[0]) writes. DeepSeek V3 and V3.1 have
// the same one: V3.1's.
ToolCallStyle DefaultToolCallStyle(std::string_view architecture);

}  // namespace sluice
