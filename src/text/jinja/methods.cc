#include <algorithm>
#include <array>

#include "fmt/format.h"
#include "text/jinja/builtins.h"
#include "text/jinja/strings.h"
#include "text/utf8.h"

namespace sluice::jinja {
namespace {

using namespace std::string_view_literals;

constexpr std::array kTextMethods = {
    "capitalize"sv,   "count"sv,        "endswith"sv,   "find"sv,  "index"sv,      "isalpha"sv, "isdigit"sv,
    "islower"sv,      "isspace"sv,      "isupper"sv,    "join"sv,  "lower"sv,      "lstrip"sv,  "partition"sv,
    "removeprefix"sv, "removesuffix"sv, "replace"sv,    "rfind"sv, "rpartition"sv, "rsplit"sv,  "rstrip"sv,
    "split"sv,        "splitlines"sv,   "startswith"sv, "strip"sv, "title"sv,      "upper"sv};
constexpr std::array kDictMethods = {"copy"sv, "get"sv, "items"sv, "keys"sv, "values"sv};
constexpr std::array kListMethods = {"copy"sv, "count"sv, "index"sv};
// The reference's sandbox refuses what would change a value that the caller owns.
constexpr std::array kRefusedDict = {"clear"sv, "pop"sv, "popitem"sv, "setdefault"sv, "update"sv};
constexpr std::array kRefusedList = {"append"sv, "clear"sv,  "extend"sv,  "insert"sv,
                                     "pop"sv,    "remove"sv, "reverse"sv, "sort"sv};

template <typename Names>
bool Among(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

const Text& TextArgument(const std::string& method, const Value* v) {
  if (v == nullptr || v->text() == nullptr) {
    throw Error{
        fmt::format("{}(): a string is required, got {}", method, v == nullptr ? "nothing" : TypeName(*v))};
  }
  return *v->text();
}

Value TextList(std::vector<Text> parts, Budget* budget) {
  budget->Charge(parts.size());
  std::vector<Value> items;
  items.reserve(parts.size());
  for (Text& part : parts) items.emplace_back(std::move(part));
  return MakeList(std::move(items));
}

// startswith and endswith take one string or a tuple of them.
bool HasAffix(const Text& self, const std::string& name, const Value* affix) {
  const auto one = [&](const Value& v) {
    const std::string& s = TextArgument(name, &v).str();
    return name == "startswith" ? self.str().starts_with(s) : self.str().ends_with(s);
  };
  if (affix != nullptr && affix->list() != nullptr)
    return std::any_of(affix->list()->items.begin(), affix->list()->items.end(), one);
  TextArgument(name, affix);
  return one(*affix);
}

template <typename Predicate>
bool AllChars(const std::string& s, Predicate p) {
  for (size_t pos = 0; pos < s.size();) {
    const Utf8Step step = DecodeUtf8(s, pos);
    if (!p(step.codepoint)) return false;
    pos += step.bytes;
  }
  return !s.empty();
}

Value Partition(const Text& self, const std::string& separator, bool last) {
  if (separator.empty()) throw Error{"empty separator"};
  const size_t at = last ? self.str().rfind(separator) : self.str().find(separator);
  if (at == std::string::npos) {
    std::vector<Value> whole = {Value(Text()), Value(Text()), Value(Text())};
    whole[last ? 2 : 0] = Value(self);
    return MakeList(std::move(whole), true);
  }
  return MakeList({Value(self.Substr(0, at)), Value(self.Substr(at, at + separator.size())),
                   Value(self.Substr(at + separator.size(), self.size()))},
                  true);
}

Value TextMethod(const Text& self, const std::string& name, const Args& args, Budget* budget) {
  budget->ChargeBytes(self.size());
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const Bound a(name, args, {"chars"});
    const std::string* chars = a.Has(0) && !a[0]->IsNone() ? &TextArgument(name, a[0]).str() : nullptr;
    return Value(Strip(self, chars,
                       name == "strip"    ? Side::kBoth
                       : name == "lstrip" ? Side::kLeft
                                          : Side::kRight));
  }
  if (name == "split" || name == "rsplit") {
    const Bound a(name, args, {"sep", "maxsplit"});
    std::string separator;
    if (a.Has(0) && !a[0]->IsNone()) {
      separator = TextArgument(name, a[0]).str();
      if (separator.empty()) throw Error{"empty separator"};
    }
    return TextList(Split(self, separator, a.Integer(1, -1), name == "rsplit"), budget);
  }
  if (name == "splitlines")
    return TextList(SplitLines(self, Bound(name, args, {"keepends"}).Flag(0, false)), budget);
  if (name == "startswith" || name == "endswith")
    return Value(HasAffix(self, name, Bound(name, args, {"affix"})[0]));
  if (name == "replace") {
    const Bound a(name, args, {"old", "new", "count"});
    const Text& from = TextArgument(name, a[0]);
    const Text& to = TextArgument(name, a[1]);
    if (to.size() > from.size()) {
      budget->ChargeBytes(from.empty() ? (self.size() + 1) * (to.size() + 1)
                                       : self.size() / from.size() * to.size() + self.size());
    }
    return Value(Replace(self, from.str(), to, a.Integer(2, -1)));
  }
  if (name == "find" || name == "rfind" || name == "index") {
    const Bound a(name, args, {"sub"});
    const std::string& sub = TextArgument(name, a[0]).str();
    const size_t at = name == "rfind" ? self.str().rfind(sub) : self.str().find(sub);
    if (at != std::string::npos) return Value(CharCount(std::string_view(self.str()).substr(0, at)));
    if (name == "index") throw Error{"substring not found"};
    return Value(-1);
  }
  if (name == "count") {
    const Bound a(name, args, {"sub"});
    const std::string& sub = TextArgument(name, a[0]).str();
    if (sub.empty()) return Value(CharCount(self.str()) + 1);
    size_t n = 0;
    for (size_t at = 0; (at = self.str().find(sub, at)) != std::string::npos; at += sub.size()) ++n;
    return Value(n);
  }
  if (name == "join") {
    const Bound a(name, args, {"iterable"});
    if (!a.Has(0)) throw Error{"join() takes one argument"};
    Text out;
    bool first = true;
    for (const Value& v : Iterate(*a[0], budget)) {
      if (!first) out.Append(self);
      first = false;
      out.Append(TextArgument(name, &v));
      budget->ChargeBytes(out.size() > budget->text_limit() ? out.size() : v.text()->size() + self.size());
    }
    return Value(std::move(out));
  }
  if (name == "partition" || name == "rpartition") {
    return Partition(self, TextArgument(name, Bound(name, args, {"sep"})[0]).str(), name == "rpartition");
  }
  if (name == "removeprefix" || name == "removesuffix") {
    const Bound a(name, args, {"affix"});
    const std::string& affix = TextArgument(name, a[0]).str();
    if (!HasAffix(self, name == "removeprefix" ? "startswith" : "endswith", a[0])) return Value(self);
    return Value(name == "removeprefix" ? self.Substr(affix.size(), self.size())
                                        : self.Substr(0, self.size() - affix.size()));
  }
  const Bound none(name, args, {});
  if (name == "upper") return Value(Upper(self));
  if (name == "lower") return Value(Lower(self));
  if (name == "title") return Value(TitleMethod(self));
  if (name == "capitalize") return Value(Capitalize(self));
  if (name == "isupper" || name == "islower") return Value(IsAllCase(self.str(), name == "isupper"));
  if (name == "isspace") return Value(AllChars(self.str(), IsPythonSpace));
  if (name == "isdigit")
    return Value(AllChars(self.str(), [](char32_t cp) { return cp >= '0' && cp <= '9'; }));
  if (name == "isalpha") {
    return Value(AllChars(self.str(), [](char32_t cp) {
      return (cp >= 'a' && cp <= 'z') || (cp >= 'A' && cp <= 'Z') || (cp >= 0x80 && IsWordChar(cp));
    }));
  }
  throw Error{fmt::format("'str' object has no attribute '{}'", name)};
}

Value DictMethod(const Value& self, const std::string& name, const Args& args, Budget* budget) {
  const Dict& d = *self.dict();
  if (name == "get") {
    const Bound a(name, args, {"key", "default"});
    if (!a.Has(0)) throw Error{"get() takes at least one argument"};
    if (const Value* v = d.Find(*a[0])) return *v;
    return a.Has(1) ? *a[1] : Value(None{});
  }
  const Bound none(name, args, {});
  if (name == "copy") return self;
  budget->Charge(d.entries().size());
  std::vector<Value> out;
  out.reserve(d.entries().size());
  for (const auto& [key, value] : d.entries()) {
    out.push_back(name == "keys" ? key : name == "values" ? value : MakeList({key, value}, true));
  }
  return MakeList(std::move(out));
}

Value ListMethod(const Value& self, const std::string& name, const Args& args, Budget* budget) {
  const List& l = *self.list();
  budget->Charge(l.items.size());
  if (name == "copy") return self;
  const Bound a(name, args, {"value"});
  if (!a.Has(0)) throw Error{fmt::format("{}() takes one argument", name)};
  if (name == "count") {
    return Value(static_cast<size_t>(
        std::count_if(l.items.begin(), l.items.end(), [&](const Value& v) { return Equal(v, *a[0]); })));
  }
  for (size_t i = 0; i < l.items.size(); ++i) {
    if (Equal(l.items[i], *a[0])) return Value(i);
  }
  throw Error{"the value is not in the list"};
}

}  // namespace

bool HasMethod(const Value& self, std::string_view name) {
  if (self.text()) return Among(kTextMethods, name);
  if (self.dict()) return Among(kDictMethods, name) || Among(kRefusedDict, name);
  if (self.list()) return Among(kListMethods, name) || (!self.list()->tuple && Among(kRefusedList, name));
  return false;
}

Value CallMethod(const Value& self, const std::string& name, const Args& args, Budget* budget) {
  if (self.text()) return TextMethod(*self.text(), name, args, budget);
  if ((self.dict() && Among(kRefusedDict, name)) || (self.list() && Among(kRefusedList, name))) {
    throw Error{
        fmt::format("access to attribute '{}' of '{}' object is unsafe: values cannot be changed in place; "
                    "build a new one",
                    name, TypeName(self))};
  }
  return self.dict() ? DictMethod(self, name, args, budget) : ListMethod(self, name, args, budget);
}

}  // namespace sluice::jinja
