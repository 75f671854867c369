// Writes JSON text by appending to a string: the answers and the event-stream chunks. Output is valid UTF-8
// and on one line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sluice {

// Characters of UTF-8 text; each maximal run of bytes that cannot be UTF-8 gives one U+FFFD. With
// drop_cut_tail an unfinished character at the end is left out.
class Utf8Reader {
 public:
  explicit Utf8Reader(std::string_view text, bool drop_cut_tail = false)
      : text_(text), drop_(drop_cut_tail) {}
  class Iterator {
   public:
    Iterator(std::string_view rest, bool drop) : rest_(rest), drop_(drop) { Read(); }
    char32_t operator*() const { return c_; }
    Iterator& operator++() {
      rest_.remove_prefix(n_);
      Read();
      return *this;
    }
    bool operator!=(const Iterator&) const { return n_ != 0; }

   private:
    void Read();
    std::string_view rest_;
    bool drop_;
    char32_t c_ = 0;
    size_t n_ = 0;
  };
  Iterator begin() const { return Iterator(text_, drop_); }
  Iterator end() const { return Iterator({}, false); }

 private:
  std::string_view text_;
  bool drop_;
};

// One character from the front of text: its code point (U+FFFD if the bytes are not UTF-8), its length in
// bytes, and whether the bytes end in the middle of a character that could still become valid.
struct Utf8Char {
  char32_t c = 0xFFFD;
  size_t bytes = 0;
  bool incomplete = false;
};
Utf8Char DecodeUtf8(std::string_view text);
void AppendUtf8(char32_t c, std::string* out);
bool IsUtf8(std::string_view text);

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
