#include "api/json_writer.h"

#include <cmath>
#include <iterator>

#include "base/check.h"
#include "fmt/format.h"

namespace sluice {

Utf8Char DecodeUtf8(std::string_view text) {
  if (text.empty()) return {};
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1, false};
  size_t length = 0;
  unsigned char low = 0x80, high = 0xBF;  // allowed range of the second byte
  char32_t c = 0;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
    c = lead & 0x1F;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    c = lead & 0x0F;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;  // surrogates
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    c = lead & 0x07;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {0xFFFD, 1, false};
  }
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {0xFFFD, i, true};
    if (byte(i) < low || byte(i) > high) return {0xFFFD, i, false};
    c = (c << 6) | (byte(i) & 0x3F);
    low = 0x80;
    high = 0xBF;
  }
  return {c, length, false};
}

void Utf8Reader::Iterator::Read() {
  const Utf8Char next = DecodeUtf8(rest_);
  c_ = next.c;
  n_ = drop_ && next.incomplete ? 0 : next.bytes;
}

void AppendUtf8(char32_t c, std::string* out) {
  if (c < 0x80) {
    *out += char(c);
  } else if (c < 0x800) {
    *out += char(0xC0 | (c >> 6));
    *out += char(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    *out += char(0xE0 | (c >> 12));
    *out += char(0x80 | ((c >> 6) & 0x3F));
    *out += char(0x80 | (c & 0x3F));
  } else {
    *out += char(0xF0 | (c >> 18));
    *out += char(0x80 | ((c >> 12) & 0x3F));
    *out += char(0x80 | ((c >> 6) & 0x3F));
    *out += char(0x80 | (c & 0x3F));
  }
}

bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    if (static_cast<unsigned char>(text[0]) < 0x80) {
      text.remove_prefix(1);
      continue;
    }
    const Utf8Char next = DecodeUtf8(text);
    if (next.c == 0xFFFD && text.substr(0, next.bytes) != "\xEF\xBF\xBD") return false;
    text.remove_prefix(next.bytes);
  }
  return true;
}

void AppendJsonString(std::string_view value, std::string* out) {
  static constexpr char kHex[] = "0123456789abcdef";
  *out += '"';
  size_t plain = 0;  // bytes from here on that need no change
  const auto flush = [&](size_t end) { out->append(value.data() + plain, end - plain); };
  for (size_t i = 0; i < value.size();) {
    const unsigned char c = static_cast<unsigned char>(value[i]);
    if (c >= 0x20 && c != '"' && c != '\\' && c < 0x80) {
      ++i;
      continue;
    }
    if (c >= 0x80) {
      const Utf8Char next = DecodeUtf8(value.substr(i));
      if (next.c == 0xFFFD) {  // also the real one: the bytes are the same
        flush(i);
        *out += "\xEF\xBF\xBD";
        plain = i + next.bytes;
      }
      i += next.bytes;
      continue;
    }
    flush(i);
    switch (c) {
      case '"':
        *out += "\\\"";
        break;
      case '\\':
        *out += "\\\\";
        break;
      case '\n':
        *out += "\\n";
        break;
      case '\r':
        *out += "\\r";
        break;
      case '\t':
        *out += "\\t";
        break;
      default:
        *out += "\\u00";
        *out += kHex[c >> 4];
        *out += kHex[c & 15];
    }
    plain = ++i;
  }
  flush(value.size());
  *out += '"';
}

JsonWriter& JsonWriter::Open(char open, char close) {
  BeforeValue();
  *out_ += open;
  closers_ += close;
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::End() {
  SLUICE_DCHECK(!closers_.empty());
  *out_ += closers_.back();
  closers_.pop_back();
  comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::Key(std::string_view key) {
  BeforeValue();
  AppendJsonString(key, out_);
  *out_ += ':';
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::Text(std::string_view value) {
  BeforeValue();
  AppendJsonString(value, out_);
  return *this;
}

JsonWriter& JsonWriter::Int(int64_t value) {
  BeforeValue();
  fmt::format_to(std::back_inserter(*out_), "{}", value);
  return *this;
}

JsonWriter& JsonWriter::Num(double value) {
  if (!std::isfinite(value)) return Null();
  BeforeValue();
  fmt::format_to(std::back_inserter(*out_), "{}", value);
  return *this;
}

JsonWriter& JsonWriter::Logprob(float value) {
  if (std::isnan(value)) return Null();
  BeforeValue();
  if (std::isinf(value)) {
    *out_ += "-9999.0";
  } else {
    fmt::format_to(std::back_inserter(*out_), "{}", value);
  }
  return *this;
}

JsonWriter& JsonWriter::Bool(bool value) {
  BeforeValue();
  *out_ += value ? "true" : "false";
  return *this;
}

JsonWriter& JsonWriter::Null() {
  BeforeValue();
  *out_ += "null";
  return *this;
}

JsonWriter& JsonWriter::Raw(std::string_view json) {
  BeforeValue();
  *out_ += json;
  return *this;
}

}  // namespace sluice
