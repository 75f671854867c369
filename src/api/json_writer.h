// Writes JSON text by appending to a string: the answers and the event-stream chunks. Output is valid UTF-8
// and on one line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sluice {

// Calls chain: w.Object().Key("a").Int(1).Key("b").Array().Text("x").End().End(). Commas are the writer's
// business.
class JsonWriter {
 public:
  explicit JsonWriter(std::string* out) : out_(out) {}
  JsonWriter& Object() { return Open('{', '}'); }
  JsonWriter& Array() { return Open('[', ']'); }
  JsonWriter& End();
  JsonWriter& Key(std::string_view key);
  JsonWriter& Text(std::string_view value);
  JsonWriter& TextOrNull(std::string_view value) { return value.empty() ? Null() : Text(value); }
  JsonWriter& Int(int64_t value);
  JsonWriter& Num(double value);     // not finite: null
  JsonWriter& Logprob(float value);  // -inf: -9999 (JSON has no infinity); NaN: null
  JsonWriter& Bool(bool value);
  JsonWriter& Null();
  JsonWriter& Raw(std::string_view json);  // a whole value

 private:
  JsonWriter& Open(char open, char close);
  void BeforeValue() {
    if (comma_) *out_ += ',';
    comma_ = true;
  }
  std::string* out_;
  bool comma_ = false;
  std::string closers_;
};

// Appends value as a JSON string literal.
void AppendJsonString(std::string_view value, std::string* out);

}  // namespace sluice
