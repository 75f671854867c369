#include "grammar/program.h"

#include <algorithm>
#include <utility>

#include "text/utf8.h"

namespace sluice {
namespace {

using Kind = GrammarExpr::Kind;

ExprPtr Make(GrammarExpr e) { return std::make_shared<const GrammarExpr>(std::move(e)); }

// Nodes and edges while they grow.
class Emitter {
 public:
  int32_t NewNode() {
    out_.emplace_back();
    return int32_t(out_.size()) - 1;
  }
  bool full() const { return int32_t(out_.size()) > kGrammarNodesMax; }

  void Emit(const GrammarExpr& e, int32_t from, int32_t to) {
    if (full()) return;
    switch (e.kind) {
      case Kind::kEmpty:
        return Add(from, {.to = to});
      case Kind::kNever:
        return;
      case Kind::kLiteral:
        return EmitLiteral(e.literal, from, to);
      case Kind::kChars:
        return EmitChars(e.chars, from, to);
      case Kind::kToken:
        return Add(from, {.kind = GrammarEdge::Kind::kToken, .id = e.id, .to = to});
      case Kind::kRule:
        return Add(from, {.kind = GrammarEdge::Kind::kRule, .id = e.id, .to = to});
      case Kind::kSeq: {
        int32_t at = from;
        for (size_t i = 0; i < e.parts.size(); ++i) {
          const int32_t next = i + 1 == e.parts.size() ? to : NewNode();
          Emit(*e.parts[i], at, next);
          at = next;
        }
        if (e.parts.empty()) Add(from, {.to = to});
        return;
      }
      case Kind::kAlt:
        for (const ExprPtr& part : e.parts) {
          // A node of its own: another alternative may loop at the shared one.
          const int32_t begin = NewNode();
          Add(from, {.to = begin});
          Emit(*part, begin, to);
        }
        return;
      case Kind::kRepeat:
        return EmitRepeat(e, from, to);
    }
  }

  std::vector<std::vector<GrammarEdge>> Take() { return std::move(out_); }

 private:
  void Add(int32_t from, GrammarEdge edge) { out_[size_t(from)].push_back(edge); }

  void EmitLiteral(std::string_view text, int32_t from, int32_t to) {
    if (text.empty()) return Add(from, {.to = to});
    int32_t at = from;
    for (size_t i = 0; i < text.size(); ++i) {
      const int32_t next = i + 1 == text.size() ? to : NewNode();
      const uint8_t byte = uint8_t(text[i]);
      Add(at, {.kind = GrammarEdge::Kind::kBytes, .low = byte, .high = byte, .to = next});
      at = next;
    }
  }

  void EmitChars(const CharSet& set, int32_t from, int32_t to) {
    for (const Utf8Sequence& sequence : Utf8Sequences(set)) {
      int32_t at = from;
      for (int i = 0; i < sequence.length; ++i) {
        const int32_t next = i + 1 == sequence.length ? to : NewNode();
        Add(at, {.kind = GrammarEdge::Kind::kBytes,
                 .low = sequence.bytes[i].low,
                 .high = sequence.bytes[i].high,
                 .to = next});
        at = next;
      }
    }
  }

  void EmitRepeat(const GrammarExpr& e, int32_t from, int32_t to) {
    int32_t at = from;
    for (int32_t i = 0; i < e.min && !full(); ++i) {
      const int32_t next = NewNode();
      Emit(*e.parts[0], at, next);
      at = next;
    }
    if (e.max < 0) {
      const int32_t loop = NewNode();
      Add(at, {.to = loop});
      Emit(*e.parts[0], loop, loop);
      Add(loop, {.to = to});
      return;
    }
    for (int32_t i = e.min; i < e.max && !full(); ++i) {
      Add(at, {.to = to});
      const int32_t next = NewNode();
      Emit(*e.parts[0], at, next);
      at = next;
    }
    Add(at, {.to = to});
  }

  std::vector<std::vector<GrammarEdge>> out_;
};

// Fewest bytes from each node to the end of its rule: relaxed until nothing changes. Edges point to later
// nodes as a rule, so a few sweeps backwards are enough.
void FindLengths(Program* p) {
  const size_t nodes = p->is_end.size();
  p->to_end.assign(nodes, kUnreachable);
  for (size_t n = 0; n < nodes; ++n) {
    if (p->is_end[n]) p->to_end[n] = 0;
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t n = nodes; n-- > 0;) {
      int64_t best = p->to_end[n];
      for (int32_t i = p->edge_begin[n]; i < p->edge_begin[n + 1]; ++i) {
        const GrammarEdge& e = p->edges[size_t(i)];
        int64_t cost = 1;
        if (e.kind == GrammarEdge::Kind::kEpsilon) cost = 0;
        if (e.kind == GrammarEdge::Kind::kRule) cost = p->to_end[size_t(p->rules[size_t(e.id)].start)];
        best = std::min(best, std::min<int64_t>(kUnreachable, cost + p->to_end[size_t(e.to)]));
      }
      if (best < p->to_end[n]) {
        p->to_end[n] = int32_t(best);
        changed = true;
      }
    }
  }
  for (const Program::Rule& rule : p->rules) {
    const int32_t length = p->to_end[size_t(rule.start)];
    if (length < kUnreachable) p->longest_rule = std::max(p->longest_rule, length);
  }
}

// Rules that each rule can begin with before a byte was taken.
std::vector<std::vector<int32_t>> FirstRules(const Program& p) {
  std::vector<std::vector<int32_t>> first(p.rules.size());
  std::vector<int32_t> seen(p.is_end.size(), -1), todo;
  for (size_t r = 0; r < p.rules.size(); ++r) {
    todo = {p.rules[r].start};
    while (!todo.empty()) {
      const int32_t n = todo.back();
      todo.pop_back();
      if (seen[size_t(n)] == int32_t(r)) continue;
      seen[size_t(n)] = int32_t(r);
      for (int32_t i = p.edge_begin[size_t(n)]; i < p.edge_begin[size_t(n) + 1]; ++i) {
        const GrammarEdge& e = p.edges[size_t(i)];
        if (e.kind == GrammarEdge::Kind::kEpsilon) todo.push_back(e.to);
        if (e.kind != GrammarEdge::Kind::kRule) continue;
        first[r].push_back(e.id);
        if (p.to_end[size_t(p.rules[size_t(e.id)].start)] == 0) todo.push_back(e.to);
      }
    }
  }
  return first;
}

// A rule on a cycle of first rules, or -1.
int32_t LeftRecursive(const std::vector<std::vector<int32_t>>& first) {
  std::vector<uint8_t> state(first.size(), 0);  // 1: on the path, 2: done
  for (size_t begin = 0; begin < first.size(); ++begin) {
    if (state[begin] != 0) continue;
    std::vector<std::pair<int32_t, size_t>> path = {{int32_t(begin), 0}};
    state[begin] = 1;
    while (!path.empty()) {
      auto& [rule, at] = path.back();
      if (at == first[size_t(rule)].size()) {
        state[size_t(rule)] = 2;
        path.pop_back();
        continue;
      }
      const int32_t next = first[size_t(rule)][at++];
      if (state[size_t(next)] == 1) return next;
      if (state[size_t(next)] == 0) {
        state[size_t(next)] = 1;
        path.emplace_back(next, 0);
      }
    }
  }
  return -1;
}

}  // namespace

ExprPtr Empty() { return Make({}); }
ExprPtr Never() { return Make({.kind = Kind::kNever}); }
ExprPtr Literal(std::string text) { return Make({.kind = Kind::kLiteral, .literal = std::move(text)}); }
ExprPtr Chars(CharSet set) { return Make({.kind = Kind::kChars, .chars = std::move(set)}); }
ExprPtr TokenExpr(int32_t id) { return Make({.kind = Kind::kToken, .id = id}); }
ExprPtr RuleExpr(int32_t rule) { return Make({.kind = Kind::kRule, .id = rule}); }
ExprPtr Seq(std::vector<ExprPtr> parts) { return Make({.kind = Kind::kSeq, .parts = std::move(parts)}); }
ExprPtr Alt(std::vector<ExprPtr> parts) {
  if (parts.size() == 1) return parts[0];
  return Make({.kind = Kind::kAlt, .parts = std::move(parts)});
}
ExprPtr Repeat(ExprPtr part, int32_t min, int32_t max) {
  return Make({.kind = Kind::kRepeat, .parts = {std::move(part)}, .min = min, .max = max});
}

ExprPtr TextWithout(GrammarBuilder* builder, std::string_view text) {
  std::u32string end;
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = DecodeUtf8(text, i);
    end += step.codepoint;
    i += step.bytes;
  }
  // One rule for each length of `end` that has just been seen, as in Knuth, Morris and Pratt's search.
  const size_t n = end.size();
  std::vector<size_t> fallback(n, 0);
  for (size_t i = 1, k = 0; i < n; ++i) {
    while (k > 0 && end[i] != end[k]) k = fallback[k - 1];
    if (end[i] == end[k]) ++k;
    fallback[i] = k;
  }
  std::vector<int32_t> rules;
  for (size_t i = 0; i < n; ++i) rules.push_back(builder->NewRule("text"));
  for (size_t state = 0; state < n; ++state) {
    CharSet known;
    std::vector<CharSet> to(n);
    for (const char32_t c : end) {
      size_t k = state;
      while (k > 0 && end[k] != c) k = fallback[k - 1];
      if (end[k] == c) ++k;
      known.Add(c, c);
      if (k < n) to[k].Add(c, c);  // k == n: `end` is whole, which is not for us
    }
    to[0].Add(known.Complement());
    std::vector<ExprPtr> parts = {Empty()};
    for (size_t k = 0; k < n; ++k) {
      if (!to[k].empty()) parts.push_back(Seq({Chars(to[k]), RuleExpr(rules[k])}));
    }
    builder->Define(rules[state], Alt(std::move(parts)));
  }
  return RuleExpr(rules[0]);
}

int32_t GrammarBuilder::NewRule(std::string name) {
  rules_.push_back({std::move(name), nullptr});
  return int32_t(rules_.size()) - 1;
}

StatusOr<Program> GrammarBuilder::Compile(int32_t root) const {
  Program p;
  p.root = root;
  Emitter emitter;
  std::vector<int32_t> ends;
  for (size_t r = 0; r < rules_.size(); ++r) {
    Program::Rule rule;
    rule.start = emitter.NewNode();
    rule.end = emitter.NewNode();
    p.rules.push_back(rule);
  }
  for (size_t r = 0; r < rules_.size(); ++r) {
    if (rules_[r].expr != nullptr) emitter.Emit(*rules_[r].expr, p.rules[r].start, p.rules[r].end);
  }
  if (emitter.full()) {
    return Invalid(
        "the grammar needs more than {} states; make bounds such as maxLength and maxItems smaller",
        kGrammarNodesMax);
  }
  const auto lists = emitter.Take();
  p.is_end.assign(lists.size(), 0);
  for (const Program::Rule& rule : p.rules) p.is_end[size_t(rule.end)] = 1;
  for (const auto& list : lists) {
    p.edge_begin.push_back(int32_t(p.edges.size()));
    p.edges.insert(p.edges.end(), list.begin(), list.end());
  }
  p.edge_begin.push_back(int32_t(p.edges.size()));
  FindLengths(&p);
  if (const int32_t rule = LeftRecursive(FirstRules(p)); rule >= 0) {
    return Invalid(
        "{} refers to itself before it takes a character (left recursion); write it with repetition",
        rules_[size_t(rule)].name);
  }
  if (p.to_end[size_t(p.rules[size_t(root)].start)] >= kUnreachable) {
    return Invalid("nothing can match: every way through it contradicts itself or never ends");
  }
  return p;
}

}  // namespace sluice
