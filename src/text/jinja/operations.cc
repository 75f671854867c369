#include <algorithm>
#include <cmath>
#include <optional>

#include "fmt/format.h"
#include "text/jinja/builtins.h"
#include "text/jinja/strings.h"
#include "text/utf8.h"

namespace sluice::jinja {
namespace {

constexpr size_t kMaxListLength = 1'000'000;

[[noreturn]] void ThrowUndefined(const Value& v) {
  throw Error{fmt::format("'{}' is undefined", v.undefined_name())};
}

std::optional<int64_t> OptionalIndex(const Value& v) {
  if (v.IsNone()) return std::nullopt;
  if (!v.IsIntegral()) throw Error{"slice indices must be integers or None"};
  return static_cast<int64_t>(std::clamp<Int>(v.AsInt(), INT64_MIN / 4, INT64_MAX / 4));
}

}  // namespace

Bound::Bound(const std::string& function, const Args& args, std::initializer_list<std::string_view> names)
    : function_(function) {
  values_.resize(names.size());
  if (args.positional.size() > names.size()) {
    throw Error{fmt::format("{}() takes at most {} arguments, got {}", function, names.size(),
                            args.positional.size())};
  }
  for (size_t i = 0; i < args.positional.size(); ++i) values_[i] = &args.positional[i];
  for (const auto& [name, value] : args.named) {
    const auto it = std::find(names.begin(), names.end(), name);
    if (it == names.end())
      throw Error{fmt::format("{}() got an unexpected keyword argument '{}'", function, name)};
    const auto index = static_cast<size_t>(it - names.begin());
    if (values_[index] != nullptr)
      throw Error{fmt::format("{}() got multiple values for argument '{}'", function, name)};
    values_[index] = &value;
  }
}

int64_t Bound::Integer(size_t i, int64_t fallback) const {
  if (values_[i] == nullptr || values_[i]->IsNone()) return fallback;
  if (!values_[i]->IsIntegral())
    throw Error{fmt::format("{}(): an integer is required, got {}", function_, TypeName(*values_[i]))};
  return static_cast<int64_t>(std::clamp<Int>(values_[i]->AsInt(), INT64_MIN / 4, INT64_MAX / 4));
}

Value GetAttribute(const Value& object, const std::string& name) {
  if (object.IsUndefined()) ThrowUndefined(object);
  if (Namespace* ns = object.ns()) {
    const Value* v = ns->Find(name);
    return v == nullptr ? Value(Undefined{name}) : *v;
  }
  if (HasMethod(object, name)) {
    auto method = std::make_shared<Callable>();
    method->kind = Callable::Kind::kMethod;
    method->name = name;
    method->self = object;
    return Value(std::shared_ptr<const Callable>(std::move(method)));
  }
  if (const Dict* d = object.dict()) {
    if (const Value* v = d->Find(name)) return *v;
  }
  return Value(Undefined{name});
}

Value GetItem(const Value& object, const Value& key, Budget* budget) {
  if (object.IsUndefined()) ThrowUndefined(object);
  if (const Dict* d = object.dict()) {
    if (const Value* v = d->Find(key)) return *v;
  } else if (key.IsIntegral() && (object.list() != nullptr || object.text() != nullptr)) {
    const Int length = object.list() != nullptr ? static_cast<Int>(object.list()->items.size())
                                                : static_cast<Int>(CharCount(object.text()->str()));
    Int i = key.AsInt();
    if (i < 0) i += length;
    if (i < 0 || i >= length) return Value(Undefined{fmt::format("element {}", IntText(key.AsInt()))});
    if (const List* l = object.list()) return l->items[static_cast<size_t>(i)];
    budget->ChargeBytes(object.text()->size());
    return Value(SliceText(*object.text(), static_cast<int64_t>(i), static_cast<int64_t>(i) + 1, 1));
  }
  if (const Text* t = key.text()) return GetAttribute(object, t->str());
  return Value(Undefined{ToText(key, 1000).str()});
}

std::vector<Value> Iterate(const Value& v, Budget* budget) {
  if (v.IsUndefined()) return {};
  if (const List* l = v.list()) {
    budget->Charge(l->items.size());
    return l->items;
  }
  if (const Dict* d = v.dict()) {
    budget->Charge(d->entries().size());
    std::vector<Value> keys;
    keys.reserve(d->entries().size());
    for (const auto& [key, value] : d->entries()) keys.push_back(key);
    return keys;
  }
  if (const Text* t = v.text()) {
    budget->Charge(t->size());
    return Characters(*t);
  }
  throw Error{fmt::format("'{}' object is not iterable", TypeName(v))};
}

Value Length(const Value& v) {
  if (v.IsUndefined()) return Value(0);
  if (v.text()) return Value(CharCount(v.text()->str()));
  if (v.list()) return Value(v.list()->items.size());
  if (v.dict()) return Value(v.dict()->entries().size());
  throw Error{fmt::format("object of type '{}' has no len()", TypeName(v))};
}

bool Contains(const Value& container, const Value& item, Budget* budget) {
  if (const Text* t = container.text()) {
    if (item.text() == nullptr)
      throw Error{fmt::format("'in <string>' requires string as left operand, not {}", TypeName(item))};
    budget->ChargeBytes(t->size());
    return t->str().find(item.text()->str()) != std::string::npos;
  }
  if (const Dict* d = container.dict()) {
    CheckHashable(item);
    return d->Find(item) != nullptr;
  }
  if (const List* l = container.list()) {
    budget->Charge(l->items.size());
    return std::any_of(l->items.begin(), l->items.end(), [&](const Value& v) { return Equal(v, item); });
  }
  if (container.IsUndefined()) return false;
  throw Error{fmt::format("argument of type '{}' is not iterable", TypeName(container))};
}

Value Slice(const Value& object, const Value& start, const Value& stop, const Value& step, Budget* budget) {
  if (object.IsUndefined()) ThrowUndefined(object);
  if (object.text() == nullptr && object.list() == nullptr) {
    throw Error{fmt::format("'{}' object cannot be sliced", TypeName(object))};
  }
  const auto from = OptionalIndex(start), to = OptionalIndex(stop), by = OptionalIndex(step);
  if (const Text* t = object.text()) {
    budget->ChargeBytes(t->size());
    const SliceBounds b = ClipSlice(from, to, by, static_cast<int64_t>(CharCount(t->str())));
    return Value(SliceText(*t, b.start, b.stop, b.step));
  }
  const List* l = object.list();
  budget->Charge(l->items.size());
  const SliceBounds b = ClipSlice(from, to, by, static_cast<int64_t>(l->items.size()));
  std::vector<Value> items;
  for (int64_t i = b.start; b.step > 0 ? i < b.stop : i > b.stop; i += b.step)
    items.push_back(l->items[static_cast<size_t>(i)]);
  return MakeList(std::move(items), l->tuple);
}

Value Negate(const Value& v) {
  if (v.IsUndefined()) ThrowUndefined(v);
  if (v.IsFloat()) return Value(-v.AsDouble());
  if (v.IsIntegral()) return Value(-v.AsInt());
  throw Error{fmt::format("bad operand type for unary -: '{}'", TypeName(v))};
}

namespace {

[[noreturn]] void IntOverflow() { throw Error{"an integer grew beyond 127 bits"}; }

Int FloorDivide(Int a, Int b) {
  const Int q = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? q - 1 : q;
}

Value Power(const Value& a, const Value& b, Budget* budget) {
  if (a.IsIntegral() && b.IsIntegral() && b.AsInt() >= 0) {
    Int result = 1;
    for (Int base = a.AsInt(), n = b.AsInt(); n > 0;) {
      budget->Charge();
      if ((n & 1) != 0 && __builtin_mul_overflow(result, base, &result)) IntOverflow();
      n >>= 1;
      if (n > 0 && __builtin_mul_overflow(base, base, &base)) IntOverflow();
    }
    return Value(result);
  }
  if (a.AsDouble() == 0 && b.AsDouble() < 0) throw Error{"0.0 cannot be raised to a negative power"};
  return Value(std::pow(a.AsDouble(), b.AsDouble()));
}

Value Numbers(const std::string& op, const Value& a, const Value& b, Budget* budget) {
  const bool integral = a.IsIntegral() && b.IsIntegral();
  if (op == "**") return Power(a, b, budget);
  if (op == "/" || op == "//" || op == "%") {
    if (b.AsDouble() == 0) throw Error{"division by zero"};
    if (op == "/") return Value(a.AsDouble() / b.AsDouble());
    if (integral) {
      const Int q = FloorDivide(a.AsInt(), b.AsInt());
      return op == "//" ? Value(q) : Value(a.AsInt() - q * b.AsInt());
    }
    double m = std::fmod(a.AsDouble(), b.AsDouble());
    if (m != 0 && (m < 0) != (b.AsDouble() < 0)) m += b.AsDouble();
    return op == "%" ? Value(m) : Value(std::floor(a.AsDouble() / b.AsDouble()));
  }
  if (!integral) {
    const double x = a.AsDouble(), y = b.AsDouble();
    return Value(op == "+" ? x + y : op == "-" ? x - y : x * y);
  }
  Int r;
  const bool overflow = op == "+"   ? __builtin_add_overflow(a.AsInt(), b.AsInt(), &r)
                        : op == "-" ? __builtin_sub_overflow(a.AsInt(), b.AsInt(), &r)
                                    : __builtin_mul_overflow(a.AsInt(), b.AsInt(), &r);
  if (overflow) IntOverflow();
  return Value(r);
}

Value Repeat(const Value& sequence, Int times, Budget* budget) {
  times = std::clamp<Int>(times, 0, 1 << 30);
  const auto n = static_cast<size_t>(times);
  if (const Text* t = sequence.text()) {
    budget->ChargeBytes(t->size() * n);
    Text out;
    for (size_t i = 0; i < n && !t->empty(); ++i) out.Append(*t);
    return Value(std::move(out));
  }
  const List* l = sequence.list();
  if (l->items.size() * n > kMaxListLength)
    throw Error{fmt::format("a list grew beyond {} items", kMaxListLength)};
  budget->Charge(l->items.size() * n);
  std::vector<Value> items;
  for (size_t i = 0; i < n && !l->items.empty(); ++i)
    items.insert(items.end(), l->items.begin(), l->items.end());
  return MakeList(std::move(items), l->tuple);
}

}  // namespace

Value Arithmetic(const std::string& op, const Value& a, const Value& b, Budget* budget) {
  if (a.IsUndefined()) ThrowUndefined(a);
  if (op == "%" && a.text() != nullptr) {
    const List* tuple = b.list();
    return Value(PercentFormat(
        *a.text(), tuple != nullptr && tuple->tuple ? tuple->items : std::vector<Value>{b}, budget));
  }
  if (b.IsUndefined()) ThrowUndefined(b);
  if (a.IsNumber() && b.IsNumber()) return Numbers(op, a, b, budget);
  if (op == "+" && a.text() && b.text()) {
    budget->ChargeBytes(a.text()->size() + b.text()->size());
    Text out = *a.text();
    out.Append(*b.text());
    return Value(std::move(out));
  }
  if (op == "+" && a.list() && b.list() && a.list()->tuple == b.list()->tuple) {
    std::vector<Value> items = a.list()->items;
    items.insert(items.end(), b.list()->items.begin(), b.list()->items.end());
    if (items.size() > kMaxListLength)
      throw Error{fmt::format("a list grew beyond {} items", kMaxListLength)};
    budget->Charge(items.size());
    return MakeList(std::move(items), a.list()->tuple);
  }
  if (op == "*") {
    if ((a.text() || a.list()) && b.IsIntegral()) return Repeat(a, b.AsInt(), budget);
    if ((b.text() || b.list()) && a.IsIntegral()) return Repeat(b, a.AsInt(), budget);
  }
  if (op == "+" && a.text())
    throw Error{fmt::format("can only concatenate str (not \"{}\") to str", TypeName(b))};
  throw Error{fmt::format("unsupported operand type(s) for {}: '{}' and '{}'", op, TypeName(a), TypeName(b))};
}

Text PercentFormat(const Text& format, const std::vector<Value>& arguments, Budget* budget) {
  Text out;
  const std::string& f = format.str();
  size_t next = 0;
  const auto digits = [&](size_t* pos) {
    int n = 0;
    while (*pos < f.size() && f[*pos] >= '0' && f[*pos] <= '9')
      n = std::min(n * 10 + (f[(*pos)++] - '0'), 100'000);
    return n;
  };
  for (size_t pos = 0; pos < f.size();) {
    const size_t percent = f.find('%', pos);
    out.Append(format, pos, std::min(percent, f.size()));
    if (percent == std::string::npos) break;
    pos = percent + 1;
    bool left = false, zero = false, plus = false;
    for (; pos < f.size() && (f[pos] == '-' || f[pos] == '0' || f[pos] == '+'); ++pos) {
      left |= f[pos] == '-', zero |= f[pos] == '0', plus |= f[pos] == '+';
    }
    const int width = digits(&pos);
    int precision = -1;
    if (pos < f.size() && f[pos] == '.') {
      ++pos;
      precision = std::min(digits(&pos), 400);
    }
    if (pos >= f.size()) throw Error{"incomplete format"};
    const char kind = f[pos++];
    if (kind == '%') {
      out.Append("%", true);
      continue;
    }
    if (next >= arguments.size()) throw Error{"not enough arguments for format string"};
    const Value& v = arguments[next++];
    Text piece;
    if (kind == 's') {
      piece = ToText(v, budget->text_limit());
      if (precision >= 0)
        piece = SliceText(piece, 0,
                          std::min<int64_t>(precision, static_cast<int64_t>(CharCount(piece.str()))), 1);
    } else if (kind == 'd' || kind == 'i' || kind == 'x') {
      if (!v.IsNumber())
        throw Error{fmt::format("%{} format: a number is required, not {}", kind, TypeName(v))};
      const Int i = v.IsFloat() ? static_cast<Int>(std::clamp(v.AsDouble(), -1e30, 1e30)) : v.AsInt();
      std::string text = kind == 'x' ? fmt::format("{:x}", i) : IntText(i);
      if (plus && i >= 0) text = "+" + text;
      piece = Text(std::move(text), true);
    } else if (kind == 'f' || kind == 'e' || kind == 'g') {
      if (!v.IsNumber()) throw Error{fmt::format("must be real number, not {}", TypeName(v))};
      const int p = precision < 0 ? 6 : precision;
      std::string text = kind == 'f'   ? fmt::format("{:.{}f}", v.AsDouble(), p)
                         : kind == 'e' ? fmt::format("{:.{}e}", v.AsDouble(), p)
                                       : fmt::format("{:.{}g}", v.AsDouble(), p);
      if (plus && v.AsDouble() >= 0) text = "+" + text;
      piece = Text(std::move(text), true);
    } else {
      throw Error{fmt::format("unsupported format character '{}'", kind)};
    }
    const auto length = static_cast<int>(std::min<size_t>(CharCount(piece.str()), 100'000));
    const std::string pad(static_cast<size_t>(std::max(0, width - length)),
                          zero && !left && kind != 's' ? '0' : ' ');
    budget->ChargeBytes(out.size() + piece.size() + pad.size());
    if (left) {
      out.Append(piece);
      out.Append(pad, true);
    } else if (!pad.empty() && pad[0] == '0' && !piece.empty() &&
               (piece.str()[0] == '-' || piece.str()[0] == '+')) {
      out.Append(piece, 0, 1);
      out.Append(pad, true);
      out.Append(piece, 1, piece.size());
    } else {
      out.Append(pad, true);
      out.Append(piece);
    }
  }
  // Python lets a single argument that could be a mapping stay unused.
  const bool mapping_like =
      arguments.size() == 1 && (arguments[0].dict() != nullptr || arguments[0].IsUndefined() ||
                                (arguments[0].list() != nullptr && !arguments[0].list()->tuple));
  if (next < arguments.size() && !mapping_like) {
    throw Error{"not all arguments converted during string formatting"};
  }
  return out;
}

}  // namespace sluice::jinja
