// Filters, tests and methods of the template language.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "text/jinja/value.h"

namespace sluice::jinja {

// Work and size bounds of one rendering; templates come with checkpoints and are not trusted. Throws Error
// when used up.
class Budget {
 public:
  Budget(int64_t steps, size_t text_limit) : steps_(steps), text_limit_(text_limit) {}
  void Charge(size_t work = 1) {
    steps_ -= static_cast<int64_t>(work);
    if (steps_ < 0) throw Error{"the template took too many steps"};
  }
  void ChargeBytes(size_t bytes) {
    if (bytes > text_limit_) throw Error{"the template made a text that is too long"};
    Charge(1 + bytes / 64);
  }
  size_t text_limit() const { return text_limit_; }

 private:
  int64_t steps_;
  size_t text_limit_;
};

struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

bool IsFilter(std::string_view name);
bool IsTest(std::string_view name);
bool TestTakesArgument(std::string_view name);
const std::string& FilterNames();
const std::string& TestNames();

Value CallFilter(const std::string& name, const Value& value, const Args& args, Budget* budget);
bool CallTest(const std::string& name, const Value& value, const Args& args, Budget* budget);
bool HasMethod(const Value& self, std::string_view name);
Value CallMethod(const Value& self, const std::string& name, const Args& args, Budget* budget);

// object.name (attribute first, then item) and object[key] (item first, then attribute). What is missing is
// Undefined.
Value GetAttribute(const Value& object, const std::string& name);
Value GetItem(const Value& object, const Value& key, Budget* budget);

// The elements that a loop over `v` sees. Throws for values that are not iterable.
std::vector<Value> Iterate(const Value& v, Budget* budget);
Value Length(const Value& v);
bool Contains(const Value& container, const Value& item, Budget* budget);
Value Slice(const Value& object, const Value& start, const Value& stop, const Value& step, Budget* budget);
Value Arithmetic(const std::string& op, const Value& a, const Value& b, Budget* budget);
Value Negate(const Value& v);
Text PercentFormat(const Text& format, const std::vector<Value>& arguments, Budget* budget);

// Arguments by position or name, as a signature lists them.
class Bound {
 public:
  Bound(const std::string& function, const Args& args, std::initializer_list<std::string_view> names);
  const Value* operator[](size_t i) const { return values_[i]; }
  bool Has(size_t i) const { return values_[i] != nullptr; }
  bool Flag(size_t i, bool fallback) const { return values_[i] == nullptr ? fallback : Truth(*values_[i]); }
  int64_t Integer(size_t i, int64_t fallback) const;

 private:
  const std::string& function_;
  std::vector<const Value*> values_;
};

}  // namespace sluice::jinja
