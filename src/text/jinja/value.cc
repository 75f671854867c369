#include "text/jinja/value.h"

#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "fmt/format.h"
#include "text/utf8.h"

namespace sluice::jinja {

int Value::depth() const {
  if (const List* l = list()) return l->depth;
  if (const Dict* d = dict()) return d->depth();
  return 0;
}

namespace {
void CheckDepth(int depth) {
  if (depth > kMaxValueDepth) throw Error{fmt::format("a value is nested more than {} deep", kMaxValueDepth)};
}
}  // namespace

Value MakeList(std::vector<Value> items, bool tuple) {
  auto list = std::make_shared<List>();
  for (const Value& v : items) list->depth = std::max(list->depth, v.depth() + 1);
  CheckDepth(list->depth);
  list->items = std::move(items);
  list->tuple = tuple;
  return Value(std::shared_ptr<const List>(std::move(list)));
}

void Dict::Set(Value key, Value value) {
  CheckHashable(key);
  depth_ = std::max(depth_, value.depth() + 1);
  CheckDepth(depth_);
  if (const Text* t = key.text()) {
    const auto [it, inserted] = index_.emplace(t->str(), entries_.size());
    if (!inserted) {
      entries_[it->second].second = std::move(value);
      return;
    }
  } else {
    for (auto& [k, v] : entries_) {
      if (Equal(k, key)) {
        v = std::move(value);
        return;
      }
    }
  }
  entries_.emplace_back(std::move(key), std::move(value));
}

const Value* Dict::Find(std::string_view key) const {
  if (entries_.size() <= 8) {
    for (const auto& [k, v] : entries_) {
      if (k.text() != nullptr && k.text()->str() == key) return &v;
    }
    return nullptr;
  }
  const auto it = index_.find(std::string(key));
  return it == index_.end() ? nullptr : &entries_[it->second].second;
}

const Value* Dict::Find(const Value& key) const {
  if (const Text* t = key.text()) return Find(t->str());
  for (const auto& [k, v] : entries_) {
    if (Equal(k, key)) return &v;
  }
  return nullptr;
}

Value* Namespace::Find(std::string_view name) {
  for (auto& [k, v] : attributes) {
    if (k == name) return &v;
  }
  return nullptr;
}

namespace {
Value FromJsonAt(const Json& json, bool from_template, int depth) {
  CheckDepth(depth);
  switch (json.type()) {
    case Json::value_t::string: {
      const auto& s = json.get_ref<const std::string&>();
      return Value(Text(IsValidUtf8(s) ? s : ReplaceInvalidUtf8(s), from_template));
    }
    case Json::value_t::boolean:
      return Value(json.get<bool>());
    case Json::value_t::number_integer:
      return Value(static_cast<Int>(json.get<int64_t>()));
    case Json::value_t::number_unsigned:
      return Value(static_cast<Int>(json.get<uint64_t>()));
    case Json::value_t::number_float:
      return Value(json.get<double>());
    case Json::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const Json& item : json) items.push_back(FromJsonAt(item, from_template, depth + 1));
      return MakeList(std::move(items));
    }
    case Json::value_t::object: {
      auto dict = std::make_shared<Dict>();
      for (const auto& [key, value] : json.items()) {
        dict->Set(Value(Text(IsValidUtf8(key) ? key : ReplaceInvalidUtf8(key), from_template)),
                  FromJsonAt(value, from_template, depth + 1));
      }
      return Value(std::shared_ptr<const Dict>(std::move(dict)));
    }
    default:
      return Value(None{});
  }
}
}  // namespace

Value FromJson(const Json& json, bool from_template) { return FromJsonAt(json, from_template, 0); }

bool Truth(const Value& v) {
  if (v.IsUndefined() || v.IsNone()) return false;
  if (v.IsFloat()) return v.AsDouble() != 0;
  if (v.IsIntegral()) return v.AsInt() != 0;
  if (v.text()) return !v.text()->empty();
  if (v.list()) return !v.list()->items.empty();
  if (v.dict()) return !v.dict()->entries().empty();
  return true;
}

namespace {

// Shared parts make a value's tree far larger than the value, so a comparison counts what it visits.
constexpr int kMaxComparisons = 2'000'000;

void CheckHashableCounted(const Value& v, int* left) {
  if (--*left < 0) throw Error{"a key visits too many values"};
  if (v.dict() != nullptr) throw Error{"unhashable type: 'dict'"};
  if (v.list() == nullptr) return;
  if (!v.list()->tuple) throw Error{"unhashable type: 'list'"};
  for (const Value& item : v.list()->items) CheckHashableCounted(item, left);
}

bool EqualCounted(const Value& a, const Value& b, int* left) {
  if (--*left < 0) throw Error{"a comparison visits too many values"};
  if (a.IsUndefined() || b.IsUndefined()) return a.IsUndefined() && b.IsUndefined();
  if (a.IsNumber() && b.IsNumber()) {
    if (a.IsIntegral() && b.IsIntegral()) return a.AsInt() == b.AsInt();
    return a.AsDouble() == b.AsDouble();
  }
  if (a.IsNone() || b.IsNone()) return a.IsNone() && b.IsNone();
  if (a.text() && b.text()) return a.text()->str() == b.text()->str();
  if (a.list() && b.list()) {
    const auto &x = a.list()->items, &y = b.list()->items;
    return a.list()->tuple == b.list()->tuple && x.size() == y.size() &&
           std::equal(x.begin(), x.end(), y.begin(),
                      [&](const Value& v, const Value& w) { return EqualCounted(v, w, left); });
  }
  if (a.dict() && b.dict()) {
    if (a.dict()->entries().size() != b.dict()->entries().size()) return false;
    for (const auto& [k, v] : a.dict()->entries()) {
      const Value* other = b.dict()->Find(k);
      if (other == nullptr || !EqualCounted(v, *other, left)) return false;
    }
    return true;
  }
  return (a.ns() != nullptr && a.ns() == b.ns()) || (a.callable() != nullptr && a.callable() == b.callable());
}

}  // namespace

void CheckHashable(const Value& v) {
  int left = kMaxComparisons;
  CheckHashableCounted(v, &left);
}

bool Equal(const Value& a, const Value& b) {
  int left = kMaxComparisons;
  return EqualCounted(a, b, &left);
}

bool Less(const Value& a, const Value& b) {
  for (const Value* v : {&a, &b}) {
    if (v->IsUndefined()) throw Error{fmt::format("'{}' is undefined", v->undefined_name())};
  }
  if (a.IsNumber() && b.IsNumber()) {
    if (a.IsIntegral() && b.IsIntegral()) return a.AsInt() < b.AsInt();
    return a.AsDouble() < b.AsDouble();
  }
  if (a.text() && b.text()) return a.text()->str() < b.text()->str();
  if (a.list() && b.list() && a.list()->tuple == b.list()->tuple) {
    const auto &x = a.list()->items, &y = b.list()->items;
    for (size_t i = 0; i < x.size() && i < y.size(); ++i) {
      if (!Equal(x[i], y[i])) return Less(x[i], y[i]);
    }
    return x.size() < y.size();
  }
  throw Error{fmt::format("'<' not supported between '{}' and '{}'", TypeName(a), TypeName(b))};
}

const char* TypeName(const Value& v) {
  if (v.IsUndefined()) return "Undefined";
  if (v.IsNone()) return "NoneType";
  if (v.IsBool()) return "bool";
  if (v.IsInt()) return "int";
  if (v.IsFloat()) return "float";
  if (v.text()) return "str";
  if (v.list()) return v.list()->tuple ? "tuple" : "list";
  if (v.dict()) return "dict";
  if (v.ns()) return "Namespace";
  return "function";
}

std::string IntText(Int i) { return fmt::format("{}", i); }

std::string FloatRepr(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d > 0 ? "inf" : "-inf";
  char buffer[64];
  // The shortest digits that give d back, as d.ddde±xx.
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, d, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  std::string sign;
  if (text[0] == '-') sign = "-", text.remove_prefix(1);
  const size_t e = text.find('e');
  std::string digits(text.substr(0, e));
  std::erase(digits, '.');
  int exponent = 0;
  std::string_view exponent_text = text.substr(e + 1);
  if (exponent_text[0] == '+') exponent_text.remove_prefix(1);
  std::from_chars(exponent_text.data(), exponent_text.data() + exponent_text.size(), exponent);
  const int n = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    std::string out = sign + digits[0];
    if (n > 1) out += "." + digits.substr(1);
    return out + fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (n <= exponent + 1)
    return sign + digits + std::string(static_cast<size_t>(exponent + 1 - n), '0') + ".0";
  return sign + digits.substr(0, static_cast<size_t>(exponent) + 1) + "." +
         digits.substr(static_cast<size_t>(exponent) + 1);
}

namespace {

bool Printable(char32_t cp) {
  if (cp == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(cp))) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

// Writes Python's repr or JSON into one plain string, watching whether any string came from messages.
class Writer {
 public:
  explicit Writer(size_t limit) : limit_(limit) {}
  std::string out;
  bool all_template = true;

  void Note(const Text& t) { all_template = all_template && t.all_from_template(); }
  void Check(int depth) const {
    if (out.size() > limit_) throw Error{fmt::format("a text grew beyond {} bytes", limit_)};
    if (depth > kMaxValueDepth + 2) throw Error{"a value contains itself"};
  }

  void Repr(const Value& v, int depth) {
    Check(depth);
    if (v.IsNone()) {
      out += "None";
    } else if (v.IsBool()) {
      out += v.AsBool() ? "True" : "False";
    } else if (v.IsInt()) {
      out += IntText(v.AsInt());
    } else if (v.IsFloat()) {
      out += FloatRepr(v.AsDouble());
    } else if (v.IsUndefined()) {
      out += "Undefined";
    } else if (const Text* t = v.text()) {
      Note(*t);
      Quote(t->str());
    } else if (const List* l = v.list()) {
      out += l->tuple ? '(' : '[';
      for (size_t i = 0; i < l->items.size(); ++i) {
        if (i > 0) out += ", ";
        Repr(l->items[i], depth + 1);
      }
      if (l->tuple && l->items.size() == 1) out += ',';
      out += l->tuple ? ')' : ']';
    } else if (const Dict* d = v.dict()) {
      out += '{';
      bool first = true;
      for (const auto& [key, value] : d->entries()) {
        if (!first) out += ", ";
        first = false;
        Repr(key, depth + 1);
        out += ": ";
        Repr(value, depth + 1);
      }
      out += '}';
    } else if (Namespace* n = v.ns()) {
      out += "<Namespace {";
      bool first = true;
      for (const auto& [key, value] : n->attributes) {
        if (!first) out += ", ";
        first = false;
        Quote(key);
        out += ": ";
        Repr(value, depth + 1);
      }
      out += "}>";
    } else {
      out += "<function " + v.callable()->name + ">";
    }
  }

  void Quote(const std::string& s) {
    const char quote = s.find('\'') != std::string::npos && s.find('"') == std::string::npos ? '"' : '\'';
    out += quote;
    for (size_t pos = 0; pos < s.size();) {
      const Utf8Step step = DecodeUtf8(s, pos);
      const char32_t cp = step.codepoint;
      if (cp == static_cast<char32_t>(quote) || cp == '\\') {
        out += '\\';
        out += static_cast<char>(cp);
      } else if (cp == '\n') {
        out += "\\n";
      } else if (cp == '\r') {
        out += "\\r";
      } else if (cp == '\t') {
        out += "\\t";
      } else if (Printable(cp)) {
        out.append(s, pos, step.bytes);
      } else if (cp < 0x100) {
        out += fmt::format("\\x{:02x}", static_cast<uint32_t>(cp));
      } else if (cp < 0x10000) {
        out += fmt::format("\\u{:04x}", static_cast<uint32_t>(cp));
      } else {
        out += fmt::format("\\U{:08x}", static_cast<uint32_t>(cp));
      }
      pos += step.bytes;
    }
    out += quote;
  }

  void Json(const Value& v, const JsonStyle& style, int depth) {
    Check(depth);
    if (v.IsNone()) {
      out += "null";
    } else if (v.IsBool()) {
      out += v.AsBool() ? "true" : "false";
    } else if (v.IsInt()) {
      out += IntText(v.AsInt());
    } else if (v.IsFloat()) {
      out += JsonFloat(v.AsDouble());
    } else if (const Text* t = v.text()) {
      Note(*t);
      JsonString(t->str(), style.ensure_ascii);
    } else if (const List* l = v.list()) {
      out += '[';
      for (size_t i = 0; i < l->items.size(); ++i) {
        Separate(i == 0, style, depth + 1);
        Json(l->items[i], style, depth + 1);
      }
      if (!l->items.empty()) NewLine(style, depth);
      out += ']';
    } else if (const Dict* d = v.dict()) {
      std::vector<const std::pair<Value, Value>*> entries;
      for (const auto& entry : d->entries()) entries.push_back(&entry);
      if (style.sort_keys) {
        std::stable_sort(entries.begin(), entries.end(),
                         [](const auto* a, const auto* b) { return Less(a->first, b->first); });
      }
      out += '{';
      for (size_t i = 0; i < entries.size(); ++i) {
        Separate(i == 0, style, depth + 1);
        JsonKey(entries[i]->first, style);
        out += style.key_separator;
        Json(entries[i]->second, style, depth + 1);
      }
      if (!entries.empty()) NewLine(style, depth);
      out += '}';
    } else {
      throw Error{fmt::format("Object of type {} is not JSON serializable", TypeName(v))};
    }
  }

 private:
  static std::string JsonFloat(double d) {
    if (std::isnan(d)) return "NaN";
    if (std::isinf(d)) return d > 0 ? "Infinity" : "-Infinity";
    return FloatRepr(d);
  }
  void NewLine(const JsonStyle& style, int depth) {
    if (!style.pretty) return;
    out += '\n';
    for (int i = 0; i < depth; ++i) out += style.indent;
    Check(0);
  }
  void Separate(bool first, const JsonStyle& style, int depth) {
    if (!first) out += style.item_separator;
    NewLine(style, depth);
  }
  void JsonKey(const Value& key, const JsonStyle& style) {
    if (const Text* t = key.text()) {
      Note(*t);
      JsonString(t->str(), style.ensure_ascii);
    } else if (key.IsNone()) {
      out += "\"null\"";
    } else if (key.IsBool()) {
      out += key.AsBool() ? "\"true\"" : "\"false\"";
    } else if (key.IsInt()) {
      out += '"' + IntText(key.AsInt()) + '"';
    } else if (key.IsFloat()) {
      out += '"' + JsonFloat(key.AsDouble()) + '"';
    } else {
      throw Error{fmt::format("keys must be str, int, float, bool or None, not {}", TypeName(key))};
    }
  }
  void JsonString(const std::string& s, bool ensure_ascii) {
    out += '"';
    for (size_t pos = 0; pos < s.size();) {
      const Utf8Step step = DecodeUtf8(s, pos);
      const auto cp = static_cast<uint32_t>(step.codepoint);
      switch (cp) {
        case '"':
          out += "\\\"";
          break;
        case '\\':
          out += "\\\\";
          break;
        case '\n':
          out += "\\n";
          break;
        case '\r':
          out += "\\r";
          break;
        case '\t':
          out += "\\t";
          break;
        case '\f':
          out += "\\f";
          break;
        case '\b':
          out += "\\b";
          break;
        default:
          if (cp < 0x20 || (ensure_ascii && cp >= 0x7F && cp != 0x7F && cp < 0x10000)) {
            out += fmt::format("\\u{:04x}", cp);
          } else if (ensure_ascii && cp >= 0x10000) {
            out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((cp - 0x10000) >> 10),
                               0xDC00 + ((cp - 0x10000) & 0x3FF));
          } else {
            out.append(s, pos, step.bytes);
          }
      }
      pos += step.bytes;
    }
    out += '"';
  }

  size_t limit_;
};

}  // namespace

Text ToText(const Value& v, size_t limit) {
  if (const Text* t = v.text()) return *t;
  if (v.IsUndefined()) return Text();
  Writer w(limit);
  w.Repr(v, 0);
  w.Check(0);
  return Text(std::move(w.out), w.all_template);
}

Text ToJson(const Value& v, const JsonStyle& style, size_t limit) {
  Writer w(limit);
  w.Json(v, style, 0);
  w.Check(0);
  return Text(std::move(w.out), w.all_template);
}

}  // namespace sluice::jinja
