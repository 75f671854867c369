#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "fmt/format.h"
#include "text/jinja/builtins.h"
#include "text/jinja/strings.h"
#include "text/utf8.h"

namespace sluice::jinja {
namespace {

using Filter = Value (*)(const std::string& name, const Value& v, const Args& args, Budget* budget);

Text Soft(const Value& v, Budget* budget) {
  Text t = ToText(v, budget->text_limit());
  budget->ChargeBytes(t.size());
  return t;
}

// "a.b.0": items first, then attributes, as Jinja's make_attrgetter does.
Value AttributePath(Value v, const Value& path, Budget* budget) {
  if (path.IsIntegral()) return GetItem(v, path, budget);
  if (path.text() == nullptr) throw Error{"attribute must be a string"};
  for (const Text& part : Split(*path.text(), ".", -1, false)) {
    const std::string& s = part.str();
    int64_t index;
    const auto parsed = std::from_chars(s.data(), s.data() + s.size(), index);
    const bool number =
        !s.empty() && parsed.ec == std::errc() && parsed.ptr == s.data() + s.size() && s[0] != '-';
    v = GetItem(v, number ? Value(static_cast<Int>(index)) : Value(part), budget);
  }
  return v;
}

Value SortKey(const Value& v, bool case_sensitive) {
  return !case_sensitive && v.text() != nullptr ? Value(Lower(*v.text())) : v;
}

Value Default(const std::string& name, const Value& v, const Args& args, Budget*) {
  const Bound a(name, args, {"default_value", "boolean"});
  if (v.IsUndefined() || (a.Flag(1, false) && !Truth(v))) return a.Has(0) ? *a[0] : Value(Text());
  return v;
}
Value LengthFilter(const std::string& name, const Value& v, const Args& args, Budget*) {
  Bound(name, args, {});
  return Length(v);
}
Value Trim(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const Bound a(name, args, {"chars"});
  const bool given = a.Has(0) && !a[0]->IsNone();
  const std::string chars = given ? ToText(*a[0], budget->text_limit()).str() : "";
  return Value(Strip(Soft(v, budget), given ? &chars : nullptr, Side::kBoth));
}
template <Text (*F)(const Text&)>
Value MapText(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  Bound(name, args, {});
  return Value(F(Soft(v, budget)));
}
Value String(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  Bound(name, args, {});
  return Value(Soft(v, budget));
}
Value First(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  Bound(name, args, {});
  std::vector<Value> items = Iterate(v, budget);
  return items.empty() ? Value(Undefined{"the first item of an empty sequence"}) : items.front();
}
Value Last(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  Bound(name, args, {});
  std::vector<Value> items = Iterate(v, budget);
  return items.empty() ? Value(Undefined{"the last item of an empty sequence"}) : items.back();
}
Value ToList(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  Bound(name, args, {});
  return MakeList(Iterate(v, budget));
}
Value Items(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  Bound(name, args, {});
  if (v.IsUndefined()) return MakeList({});
  if (v.dict() == nullptr) throw Error{"can only get item pairs from a mapping"};
  return CallMethod(v, "items", {}, budget);
}
Value Join(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const Bound a(name, args, {"d", "attribute"});
  const Text separator = a.Has(0) ? ToText(*a[0], budget->text_limit()) : Text();
  Text out;
  bool first = true;
  for (Value item : Iterate(v, budget)) {
    if (a.Has(1) && !a[1]->IsNone()) item = AttributePath(item, *a[1], budget);
    if (!first) out.Append(separator);
    first = false;
    const Text piece = ToText(item, budget->text_limit());
    out.Append(piece);
    budget->ChargeBytes(out.size() > budget->text_limit() ? out.size() : piece.size() + separator.size());
  }
  return Value(std::move(out));
}
Value ReplaceFilter(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const Bound a(name, args, {"old", "new", "count"});
  if (!a.Has(0) || !a.Has(1)) throw Error{"replace needs the old and the new text"};
  Args method;
  method.positional = {Value(Soft(*a[0], budget)), Value(Soft(*a[1], budget)),
                       Value(static_cast<Int>(a.Integer(2, -1)))};
  return CallMethod(Value(Soft(v, budget)), "replace", method, budget);
}
Value Reverse(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  Bound(name, args, {});
  if (v.text() != nullptr) return Slice(v, None{}, None{}, Value(-1), budget);
  std::vector<Value> items = Iterate(v, budget);
  std::reverse(items.begin(), items.end());
  return MakeList(std::move(items));
}

std::optional<Int> ParseInt(std::string_view text, int base) {
  const size_t begin = text.find_first_not_of(" \t\n\r\f\v");
  if (begin == std::string_view::npos) return std::nullopt;
  text = text.substr(begin, text.find_last_not_of(" \t\n\r\f\v") - begin + 1);
  const bool negative = text[0] == '-';
  if (text[0] == '-' || text[0] == '+') text.remove_prefix(1);
  std::string digits;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '_' && i > 0 && i + 1 < text.size() && text[i - 1] != '_') continue;
    digits += text[i];
  }
  if (digits.empty() || digits[0] == '-' || digits[0] == '+') return std::nullopt;
  int64_t value = 0;
  const auto r = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  if (r.ec == std::errc::result_out_of_range) throw Error{fmt::format("integer {} is out of range", text)};
  if (r.ec != std::errc() || r.ptr != digits.data() + digits.size()) return std::nullopt;
  return negative ? -static_cast<Int>(value) : static_cast<Int>(value);
}
std::optional<double> ParseFloat(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\n\r\f\v");
  if (begin == std::string_view::npos) return std::nullopt;
  text = text.substr(begin, text.find_last_not_of(" \t\n\r\f\v") - begin + 1);
  if (text[0] == '+') text.remove_prefix(1);
  double value = 0;
  const auto r = std::from_chars(text.data(), text.data() + text.size(), value);
  if (r.ptr != text.data() + text.size() || text.empty()) return std::nullopt;
  if (r.ec == std::errc::result_out_of_range) return std::strtod(std::string(text).c_str(), nullptr);
  return value;
}
Value TruncateFloat(double d, const Value& fallback) {
  if (!std::isfinite(d) || std::fabs(d) > 1e37) return fallback;
  return Value(static_cast<Int>(d));
}
Value ToInt(const std::string& name, const Value& v, const Args& args, Budget*) {
  const Bound a(name, args, {"default", "base"});
  const Value fallback = a.Has(0) ? *a[0] : Value(0);
  if (v.IsUndefined()) throw Error{fmt::format("'{}' is undefined", v.undefined_name())};
  if (v.IsIntegral()) return Value(v.AsInt());
  if (v.IsFloat()) return TruncateFloat(v.AsDouble(), fallback);
  if (v.text() == nullptr) return fallback;
  const int64_t base = a.Integer(1, 10);
  if (base < 2 || base > 36) throw Error{"int() base must be >= 2 and <= 36"};
  if (const auto i = ParseInt(v.text()->str(), static_cast<int>(base))) return Value(*i);
  if (const auto d = ParseFloat(v.text()->str())) return TruncateFloat(*d, fallback);
  return fallback;
}
Value ToFloat(const std::string& name, const Value& v, const Args& args, Budget*) {
  const Bound a(name, args, {"default"});
  const Value fallback = a.Has(0) ? *a[0] : Value(0.0);
  if (v.IsUndefined()) throw Error{fmt::format("'{}' is undefined", v.undefined_name())};
  if (v.IsNumber()) return Value(v.AsDouble());
  if (v.text() == nullptr) return fallback;
  const auto d = ParseFloat(v.text()->str());
  return d ? Value(*d) : fallback;
}
Value Abs(const std::string& name, const Value& v, const Args& args, Budget*) {
  Bound(name, args, {});
  if (!v.IsNumber()) throw Error{fmt::format("bad operand type for abs(): '{}'", TypeName(v))};
  if (v.IsFloat()) return Value(std::fabs(v.AsDouble()));
  return Value(v.AsInt() < 0 ? -v.AsInt() : v.AsInt());
}
Value Round(const std::string& name, const Value& v, const Args& args, Budget*) {
  const Bound a(name, args, {"precision", "method"});
  if (!v.IsNumber()) throw Error{fmt::format("round: a number is required, got {}", TypeName(v))};
  const int64_t precision = std::clamp<int64_t>(a.Integer(0, 0), -300, 300);
  const std::string method = a.Has(1) && a[1]->text() != nullptr ? a[1]->text()->str() : "common";
  const double scale = std::pow(10.0, static_cast<double>(precision));
  if (method == "ceil") return Value(std::ceil(v.AsDouble() * scale) / scale);
  if (method == "floor") return Value(std::floor(v.AsDouble() * scale) / scale);
  if (method != "common") throw Error{"method must be common, ceil or floor"};
  if (precision < 0) return Value(std::nearbyint(v.AsDouble() * scale) / scale);
  const double rounded = std::strtod(fmt::format("{:.{}f}", v.AsDouble(), precision).c_str(), nullptr);
  return v.IsIntegral() ? Value(v.AsInt()) : Value(rounded);
}
Value Sum(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const Bound a(name, args, {"attribute", "start"});
  Value total = a.Has(1) ? *a[1] : Value(0);
  for (const Value& item : Iterate(v, budget)) {
    total = Arithmetic("+", total, a.Has(0) && !a[0]->IsNone() ? AttributePath(item, *a[0], budget) : item,
                       budget);
  }
  return total;
}
Value Extreme(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const Bound a(name, args, {"case_sensitive", "attribute"});
  const std::vector<Value> items = Iterate(v, budget);
  if (items.empty()) return Value(Undefined{"an item of an empty sequence"});
  const auto key = [&](const Value& item) {
    return SortKey(a.Has(1) && !a[1]->IsNone() ? AttributePath(item, *a[1], budget) : item, a.Flag(0, false));
  };
  size_t best = 0;
  for (size_t i = 1; i < items.size(); ++i) {
    if (name == "min" ? Less(key(items[i]), key(items[best])) : Less(key(items[best]), key(items[i])))
      best = i;
  }
  return items[best];
}
Value Unique(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const Bound a(name, args, {"case_sensitive", "attribute"});
  std::vector<Value> seen, out;
  for (const Value& item : Iterate(v, budget)) {
    const Value key =
        SortKey(a.Has(1) && !a[1]->IsNone() ? AttributePath(item, *a[1], budget) : item, a.Flag(0, false));
    budget->Charge(seen.size());
    CheckHashable(key);
    if (std::any_of(seen.begin(), seen.end(), [&](const Value& s) { return Equal(s, key); })) continue;
    seen.push_back(key);
    out.push_back(item);
  }
  return MakeList(std::move(out));
}
void SortBy(std::vector<std::pair<Value, Value>>* keyed, bool reverse, Budget* budget) {
  budget->Charge(keyed->size() * 20);
  // Python's reverse keeps the order of equal items.
  std::stable_sort(keyed->begin(), keyed->end(), [&](const auto& x, const auto& y) {
    return reverse ? Less(y.first, x.first) : Less(x.first, y.first);
  });
}
Value Sort(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const Bound a(name, args, {"reverse", "case_sensitive", "attribute"});
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : Iterate(v, budget)) {
    keyed.emplace_back(
        SortKey(a.Has(2) && !a[2]->IsNone() ? AttributePath(item, *a[2], budget) : item, a.Flag(1, false)),
        item);
  }
  SortBy(&keyed, a.Flag(0, false), budget);
  std::vector<Value> out;
  for (auto& [key, item] : keyed) out.push_back(std::move(item));
  return MakeList(std::move(out));
}
Value DictSort(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const Bound a(name, args, {"case_sensitive", "by", "reverse"});
  if (v.dict() == nullptr) throw Error{"dictsort: a mapping is required"};
  const bool by_value = a.Has(1) && a[1]->text() != nullptr && a[1]->text()->str() == "value";
  std::vector<std::pair<Value, Value>> keyed;
  for (const auto& [key, value] : v.dict()->entries()) {
    keyed.emplace_back(SortKey(by_value ? value : key, a.Flag(0, false)), MakeList({key, value}, true));
  }
  SortBy(&keyed, a.Flag(2, false), budget);
  std::vector<Value> out;
  for (auto& [key, item] : keyed) out.push_back(std::move(item));
  return MakeList(std::move(out));
}
Value Indent(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const Bound a(name, args, {"width", "first", "blank"});
  Text indention;
  if (a.Has(0) && a[0]->text() != nullptr) {
    indention = *a[0]->text();
  } else {
    indention =
        Text(std::string(static_cast<size_t>(std::clamp<int64_t>(a.Integer(0, 4), 0, 10'000)), ' '), true);
  }
  if (v.text() == nullptr) throw Error{fmt::format("indent: a string is required, got {}", TypeName(v))};
  Text source = *v.text();
  source.Append("\n", true);
  const std::vector<Text> lines = SplitLines(source, false);
  budget->ChargeBytes(source.size() + lines.size() * (indention.size() + 1));
  Text out;
  if (a.Flag(1, false)) out.Append(indention);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) {
      out.Append("\n", true);
      if (a.Flag(2, false) || !lines[i].empty()) out.Append(indention);
    }
    out.Append(lines[i]);
  }
  return Value(std::move(out));
}
Value Format(const std::string&, const Value& v, const Args& args, Budget* budget) {
  if (!args.named.empty()) throw Error{"format with named arguments is not supported"};
  return Value(PercentFormat(Soft(v, budget), args.positional, budget));
}
Value WordCount(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  Bound(name, args, {});
  const Text t = Soft(v, budget);
  size_t words = 0;
  bool inside = false;
  for (size_t pos = 0; pos < t.size();) {
    const Utf8Step step = DecodeUtf8(t.str(), pos);
    const bool word = IsWordChar(step.codepoint);
    if (word && !inside) ++words;
    inside = word;
    pos += step.bytes;
  }
  return Value(words);
}
Value Attr(const std::string& name, const Value& v, const Args& args, Budget*) {
  const Bound a(name, args, {"name"});
  if (!a.Has(0) || a[0]->text() == nullptr) throw Error{"attr needs a name"};
  if (v.dict() != nullptr && !HasMethod(v, a[0]->text()->str())) return Value(Undefined{a[0]->text()->str()});
  return GetAttribute(v, a[0]->text()->str());
}
Value ToJsonFilter(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const Bound a(name, args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = a.Flag(0, false);
  style.sort_keys = a.Flag(3, false);
  if (a.Has(1) && !a[1]->IsNone()) {
    style.pretty = true;
    style.item_separator = ",";
    style.indent = a[1]->text() != nullptr
                       ? a[1]->text()->str()
                       : std::string(static_cast<size_t>(std::clamp<int64_t>(a.Integer(1, 0), 0, 64)), ' ');
  }
  if (a.Has(2) && !a[2]->IsNone()) {
    const List* l = a[2]->list();
    if (l == nullptr || l->items.size() != 2 || !l->items[0].text() || !l->items[1].text()) {
      throw Error{"tojson: separators must be two strings"};
    }
    style.item_separator = l->items[0].text()->str();
    style.key_separator = l->items[1].text()->str();
  }
  Text out = ToJson(v, style, budget->text_limit());
  budget->ChargeBytes(out.size() * 8);
  return Value(std::move(out));
}

Args Rest(const Args& args, size_t from) {
  Args out;
  out.positional.assign(
      args.positional.begin() + static_cast<ptrdiff_t>(std::min(from, args.positional.size())),
      args.positional.end());
  out.named = args.named;
  return out;
}
const std::string& NameArgument(const Args& args, size_t i, const char* what) {
  if (i >= args.positional.size() || args.positional[i].text() == nullptr)
    throw Error{fmt::format("the name of a {} is required", what)};
  return args.positional[i].text()->str();
}
Value Map(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  std::vector<Value> out;
  if (args.positional.empty()) {
    const Bound a(name, args, {"attribute", "default"});
    if (!a.Has(0)) throw Error{"map requires a filter argument"};
    if (!Truth(v)) return MakeList({});
    for (const Value& item : Iterate(v, budget)) {
      Value x = AttributePath(item, *a[0], budget);
      out.push_back(x.IsUndefined() && a.Has(1) ? *a[1] : std::move(x));
    }
    return MakeList(std::move(out));
  }
  const std::string& filter = NameArgument(args, 0, "filter");
  if (!IsFilter(filter)) throw Error{fmt::format("no filter named '{}'", filter)};
  const Args rest = Rest(args, 1);
  if (!Truth(v)) return MakeList({});
  for (const Value& item : Iterate(v, budget)) {
    budget->Charge(10);
    out.push_back(CallFilter(filter, item, rest, budget));
  }
  return MakeList(std::move(out));
}
Value Select(const std::string& name, const Value& v, const Args& args, Budget* budget) {
  const bool by_attribute = name.ends_with("attr"), wanted = name.starts_with("select");
  const size_t test_at = by_attribute ? 1 : 0;
  if (by_attribute && args.positional.empty()) throw Error{fmt::format("{} requires an attribute", name)};
  const bool has_test = args.positional.size() > test_at;
  const std::string test = has_test ? NameArgument(args, test_at, "test") : "";
  if (has_test && !IsTest(test)) throw Error{fmt::format("no test named '{}'", test)};
  const Args rest = Rest(args, test_at + 1);
  if (!Truth(v)) return MakeList({});
  std::vector<Value> out;
  for (const Value& item : Iterate(v, budget)) {
    budget->Charge(10);
    const Value subject = by_attribute ? AttributePath(item, args.positional[0], budget) : item;
    if ((has_test ? CallTest(test, subject, rest, budget) : Truth(subject)) == wanted) out.push_back(item);
  }
  return MakeList(std::move(out));
}

const std::map<std::string_view, Filter>& Filters() {
  static const auto* filters = new std::map<std::string_view, Filter>{{"abs", Abs},
                                                                      {"attr", Attr},
                                                                      {"capitalize", MapText<Capitalize>},
                                                                      {"count", LengthFilter},
                                                                      {"d", Default},
                                                                      {"default", Default},
                                                                      {"dictsort", DictSort},
                                                                      {"e", MapText<EscapeHtml>},
                                                                      {"escape", MapText<EscapeHtml>},
                                                                      {"first", First},
                                                                      {"float", ToFloat},
                                                                      {"format", Format},
                                                                      {"indent", Indent},
                                                                      {"int", ToInt},
                                                                      {"items", Items},
                                                                      {"join", Join},
                                                                      {"last", Last},
                                                                      {"length", LengthFilter},
                                                                      {"list", ToList},
                                                                      {"lower", MapText<Lower>},
                                                                      {"map", Map},
                                                                      {"max", Extreme},
                                                                      {"min", Extreme},
                                                                      {"reject", Select},
                                                                      {"rejectattr", Select},
                                                                      {"replace", ReplaceFilter},
                                                                      {"reverse", Reverse},
                                                                      {"round", Round},
                                                                      {"safe", String},
                                                                      {"select", Select},
                                                                      {"selectattr", Select},
                                                                      {"sort", Sort},
                                                                      {"string", String},
                                                                      {"sum", Sum},
                                                                      {"title", MapText<TitleFilter>},
                                                                      {"tojson", ToJsonFilter},
                                                                      {"trim", Trim},
                                                                      {"unique", Unique},
                                                                      {"upper", MapText<Upper>},
                                                                      {"wordcount", WordCount}};
  return *filters;
}

struct TestInfo {
  bool (*run)(const Value& v, const Value* argument, Budget* budget);
  bool argument;
};

bool Remainder(const Value& v, const Value& divisor, int wanted, Budget* budget) {
  return Equal(Arithmetic("%", v, divisor, budget), Value(wanted));
}

const std::map<std::string_view, TestInfo>& Tests() {
  using V = const Value&;
  using A = const Value*;
  using B = Budget*;
  static constexpr auto kEq = [](V v, A a, B) { return Equal(v, *a); };
  static constexpr auto kNe = [](V v, A a, B) { return !Equal(v, *a); };
  static constexpr auto kLt = [](V v, A a, B) { return Less(v, *a); };
  static constexpr auto kGt = [](V v, A a, B) { return Less(*a, v); };
  static constexpr auto kLe = [](V v, A a, B) { return !Less(*a, v); };
  static constexpr auto kGe = [](V v, A a, B) { return !Less(v, *a); };
  static const auto* tests = new std::map<std::string_view, TestInfo>{
      {"defined", {[](V v, A, B) { return !v.IsUndefined(); }, false}},
      {"undefined", {[](V v, A, B) { return v.IsUndefined(); }, false}},
      {"none", {[](V v, A, B) { return v.IsNone(); }, false}},
      {"string", {[](V v, A, B) { return v.text() != nullptr; }, false}},
      {"mapping", {[](V v, A, B) { return v.dict() != nullptr; }, false}},
      {"sequence", {[](V v, A, B) { return v.IsUndefined() || v.text() || v.list() || v.dict(); }, false}},
      {"iterable", {[](V v, A, B) { return v.IsUndefined() || v.text() || v.list() || v.dict(); }, false}},
      {"number", {[](V v, A, B) { return v.IsNumber(); }, false}},
      {"integer", {[](V v, A, B) { return v.IsInt(); }, false}},
      {"float", {[](V v, A, B) { return v.IsFloat(); }, false}},
      {"boolean", {[](V v, A, B) { return v.IsBool(); }, false}},
      {"true", {[](V v, A, B) { return v.IsBool() && v.AsBool(); }, false}},
      {"false", {[](V v, A, B) { return v.IsBool() && !v.AsBool(); }, false}},
      {"callable", {[](V v, A, B) { return v.callable() != nullptr; }, false}},
      {"even", {[](V v, A, B b) { return Remainder(v, Value(2), 0, b); }, false}},
      {"odd", {[](V v, A, B b) { return Remainder(v, Value(2), 1, b); }, false}},
      {"lower", {[](V v, A, B b) { return IsAllCase(Soft(v, b).str(), false); }, false}},
      {"upper", {[](V v, A, B b) { return IsAllCase(Soft(v, b).str(), true); }, false}},
      {"divisibleby", {[](V v, A a, B b) { return Remainder(v, *a, 0, b); }, true}},
      {"sameas",
       {[](V v, A a, B) { return std::string_view(TypeName(v)) == TypeName(*a) && Equal(v, *a); }, true}},
      {"in", {[](V v, A a, B b) { return Contains(*a, v, b); }, true}},
      {"eq", {kEq, true}},
      {"equalto", {kEq, true}},
      {"==", {kEq, true}},
      {"ne", {kNe, true}},
      {"!=", {kNe, true}},
      {"lt", {kLt, true}},
      {"lessthan", {kLt, true}},
      {"<", {kLt, true}},
      {"gt", {kGt, true}},
      {"greaterthan", {kGt, true}},
      {">", {kGt, true}},
      {"le", {kLe, true}},
      {"<=", {kLe, true}},
      {"ge", {kGe, true}},
      {">=", {kGe, true}}};
  return *tests;
}

template <typename M>
std::string Names(const M& map) {
  std::string out;
  for (const auto& [name, value] : map) out += (out.empty() ? "" : ", ") + std::string(name);
  return out;
}

}  // namespace

bool IsFilter(std::string_view name) { return Filters().contains(name); }
bool IsTest(std::string_view name) { return Tests().contains(name); }
bool TestTakesArgument(std::string_view name) { return Tests().at(name).argument; }
const std::string& FilterNames() {
  static const auto* names = new std::string(Names(Filters()));
  return *names;
}
const std::string& TestNames() {
  static const auto* names = new std::string(Names(Tests()));
  return *names;
}

Value CallFilter(const std::string& name, const Value& value, const Args& args, Budget* budget) {
  budget->Charge();
  return Filters().at(name)(name, value, args, budget);
}

bool CallTest(const std::string& name, const Value& value, const Args& args, Budget* budget) {
  budget->Charge();
  const TestInfo& info = Tests().at(name);
  const size_t given = args.positional.size() + args.named.size();
  if (given != (info.argument ? 1u : 0u))
    throw Error{fmt::format("test '{}' takes {} argument, got {}", name, info.argument ? 1 : 0, given)};
  const Value* argument = !info.argument            ? nullptr
                          : args.positional.empty() ? &args.named[0].second
                                                    : &args.positional[0];
  return info.run(value, argument, budget);
}

}  // namespace sluice::jinja
