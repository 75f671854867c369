// Values of the template language: Python's, as far as chat templates see them. Containers are immutable once
// built (the reference's sandbox forbids changing them too), so they are shared freely; only namespaces
// change.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "nlohmann/json.hpp"
#include "text/jinja/text.h"

namespace sluice::jinja {

using Json = nlohmann::ordered_json;
__extension__ using Int = __int128;  // holds every JSON integer that the parser keeps as an integer

// Thrown inside the interpreter only; Template::Render turns it into a Status.
struct Error {
  std::string message;
};

class Value;
struct List;
class Dict;
struct Namespace;
struct Callable;

struct Undefined {
  std::string name;  // for the message when it is used
};
struct None {};

// Deeper nesting is refused, so that no walk over a value (printing, comparing, freeing) can run out of
// stack.
inline constexpr int kMaxValueDepth = 128;

class Value {
 public:
  Value() : rep_(None{}) {}
  Value(None) : rep_(None{}) {}
  Value(Undefined u) : rep_(std::move(u)) {}
  Value(bool b) : rep_(b) {}
  Value(int i) : rep_(static_cast<Int>(i)) {}
  Value(Int i) : rep_(i) {}
  Value(size_t i) : rep_(static_cast<Int>(i)) {}
  Value(double d) : rep_(d) {}
  Value(Text t) : rep_(std::make_shared<const Text>(std::move(t))) {}
  Value(std::shared_ptr<const List> l) : rep_(std::move(l)) {}
  Value(std::shared_ptr<const Dict> d) : rep_(std::move(d)) {}
  Value(std::shared_ptr<Namespace> n) : rep_(std::move(n)) {}
  Value(std::shared_ptr<const Callable> c) : rep_(std::move(c)) {}
  static Value OfTemplate(std::string s) { return Value(Text(std::move(s), true)); }

  bool IsUndefined() const { return std::holds_alternative<Undefined>(rep_); }
  bool IsNone() const { return std::holds_alternative<None>(rep_); }
  bool IsBool() const { return std::holds_alternative<bool>(rep_); }
  bool IsInt() const { return std::holds_alternative<Int>(rep_); }
  bool IsFloat() const { return std::holds_alternative<double>(rep_); }
  bool IsNumber() const { return IsBool() || IsInt() || IsFloat(); }
  bool IsIntegral() const { return IsBool() || IsInt(); }
  const Text* text() const { return Get<Text>(); }
  const List* list() const { return Get<List>(); }
  const Dict* dict() const { return Get<Dict>(); }
  const Callable* callable() const { return Get<Callable>(); }
  Namespace* ns() const {
    const auto* p = std::get_if<std::shared_ptr<Namespace>>(&rep_);
    return p == nullptr ? nullptr : p->get();
  }
  const std::string& undefined_name() const { return std::get<Undefined>(rep_).name; }
  bool AsBool() const { return std::get<bool>(rep_); }
  Int AsInt() const {
    return IsBool() ? static_cast<Int>(AsBool()) : std::get<Int>(rep_);
  }  // REQUIRES IsIntegral
  double AsDouble() const {
    return IsFloat() ? std::get<double>(rep_) : static_cast<double>(AsInt());
  }  // REQUIRES IsNumber
  int depth() const;

 private:
  template <typename T>
  const T* Get() const {
    const auto* p = std::get_if<std::shared_ptr<const T>>(&rep_);
    return p == nullptr ? nullptr : p->get();
  }
  std::variant<None, Undefined, bool, Int, double, std::shared_ptr<const Text>, std::shared_ptr<const List>,
               std::shared_ptr<const Dict>, std::shared_ptr<Namespace>, std::shared_ptr<const Callable>>
      rep_;
};

struct List {
  std::vector<Value> items;
  bool tuple = false;
  int depth = 1;
};
Value MakeList(std::vector<Value> items, bool tuple = false);

// Keeps insertion order. Built by Set, then shared as const.
class Dict {
 public:
  void Set(Value key, Value value);  // REQUIRES a hashable key; throws Error otherwise
  const Value* Find(std::string_view key) const;
  const Value* Find(const Value& key) const;
  const std::vector<std::pair<Value, Value>>& entries() const { return entries_; }
  int depth() const { return depth_; }
  int message_index() const { return message_index_; }
  void set_message_index(int index) { message_index_ = index; }

 private:
  std::vector<std::pair<Value, Value>> entries_;
  absl::flat_hash_map<std::string, size_t> index_;  // of string keys
  int depth_ = 1;
  int message_index_ = -1;  // >= 0: this is that message of the conversation
};

struct Namespace {
  std::vector<std::pair<std::string, Value>> attributes;
  Value* Find(std::string_view name);
};

// Something that can be called: a function of the language, a method bound to its object, or a macro.
struct Macro;  // runtime.cc
struct Callable {
  enum class Kind { kFunction, kMethod, kMacro, kLoopCycle, kLoopChanged };
  Kind kind = Kind::kFunction;
  std::string name;
  Value self;                       // kMethod; kLoop*: the loop
  std::shared_ptr<Macro> macro;     // kMacro
  std::shared_ptr<Value> previous;  // kLoopChanged: the last arguments
};

// Strings of `json` are marked as coming from the template or not.
Value FromJson(const Json& json, bool from_template);

bool Truth(const Value& v);
// Throws for lists, dicts and tuples of such: what Python cannot use as a key.
void CheckHashable(const Value& v);
bool Equal(const Value& a, const Value& b);
// Python's ordering. Throws for values that have none.
bool Less(const Value& a, const Value& b);
const char* TypeName(const Value& v);

// str(v): a string itself, anything else as Python prints it. A container's text counts as message text
// unless all its strings are the template's. Stops with an Error beyond `limit` bytes.
Text ToText(const Value& v, size_t limit);
std::string FloatRepr(double d);
std::string IntText(Int i);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool pretty = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
Text ToJson(const Value& v, const JsonStyle& style, size_t limit);

}  // namespace sluice::jinja
