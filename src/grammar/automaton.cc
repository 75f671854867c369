#include "grammar/automaton.h"

#include <algorithm>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "base/ids.h"

namespace sluice {
namespace {

constexpr int32_t kUnknown = -2;

int32_t Sum(int32_t a, int32_t b) { return int32_t(std::min<int64_t>(kUnreachable, int64_t(a) + b)); }
void SetBit(TokenMask* mask, int32_t token) { (*mask)[size_t(token) / 64] |= uint64_t(1) << (token % 64); }

}  // namespace

Automaton::Automaton(std::shared_ptr<const Program> program, std::shared_ptr<const TokenTrie> trie,
                     FirstToken first_token)
    : program_(std::move(program)), trie_(std::move(trie)), first_token_(std::move(first_token)) {
  stacks_.push_back({-1, -1, 0, 0});  // the bottom
  path_.resize(size_t(trie_->depth_max()) + 1);
  std::vector<Item> items = {uint64_t(program_->rules[size_t(program_->root)].start) << 32};
  start_ = Intern(&items);
}

int32_t Automaton::Push(int32_t node, int32_t parent) {
  const uint64_t key = uint64_t(uint32_t(node)) << 32 | uint32_t(parent);
  const auto [it, fresh] = stack_ids_.try_emplace(key, int32_t(stacks_.size()));
  if (fresh) {
    const StackNode& below = stacks_[size_t(parent)];
    stacks_.push_back({node, parent, Sum(program_->to_end[size_t(node)], below.to_end), below.depth + 1});
  }
  return it->second;
}

int32_t Automaton::Intern(std::vector<Item>* items) {
  const Program& p = *program_;
  State state;
  absl::flat_hash_set<Item> seen;
  while (!items->empty()) {
    const Item item = items->back();
    items->pop_back();
    const int32_t node = int32_t(item >> 32), stack = int32_t(uint32_t(item));
    const int32_t left = Sum(p.to_end[size_t(node)], stacks_[size_t(stack)].to_end);
    if (left >= kUnreachable || !seen.insert(item).second) continue;
    state.bytes_left = std::min(state.bytes_left, left);
    if (p.is_end[size_t(node)]) {
      if (stack == 0) {
        state.accepts = true;
      } else {
        const StackNode& top = stacks_[size_t(stack)];
        items->push_back(uint64_t(uint32_t(top.node)) << 32 | uint32_t(top.parent));
      }
      continue;
    }
    bool keeps = false;
    for (int32_t i = p.edge_begin[size_t(node)]; i < p.edge_begin[size_t(node) + 1]; ++i) {
      const GrammarEdge& e = p.edges[size_t(i)];
      switch (e.kind) {
        case GrammarEdge::Kind::kEpsilon:
          items->push_back(uint64_t(uint32_t(e.to)) << 32 | uint32_t(stack));
          break;
        case GrammarEdge::Kind::kRule: {
          // A rule at the very end of another one returns past it.
          int32_t below = stack;
          if (!p.is_end[size_t(e.to)]) {
            if (stacks_[size_t(stack)].depth >= kStackMax) break;
            below = Push(e.to, stack);
          }
          items->push_back(uint64_t(uint32_t(p.rules[size_t(e.id)].start)) << 32 | uint32_t(below));
          break;
        }
        case GrammarEdge::Kind::kToken:
          state.has_token_edges = keeps = true;
          break;
        case GrammarEdge::Kind::kBytes:
          keeps = true;
          break;
      }
    }
    if (!keeps) continue;
    state.items.push_back(item);
    state.depth = std::max(state.depth, stacks_[size_t(stack)].depth);
  }
  if (state.items.empty() && !state.accepts) return kDead;
  std::sort(state.items.begin(), state.items.end());
  std::vector<Item> key = state.items;
  key.push_back(state.accepts);
  const auto [it, fresh] = ids_.try_emplace(std::move(key), int32_t(states_.size()));
  if (fresh) {
    state.next = std::make_unique<int32_t[]>(256);
    std::fill_n(state.next.get(), 256, kUnknown);
    states_.push_back(std::move(state));
  }
  return it->second;
}

int32_t Automaton::Next(int32_t state, uint8_t byte) {
  int32_t& known = states_[size_t(state)].next[byte];
  if (known != kUnknown) return known;
  work_.clear();
  for (const Item item : states_[size_t(state)].items) {
    const size_t node = size_t(item >> 32);
    for (int32_t i = program_->edge_begin[node]; i < program_->edge_begin[node + 1]; ++i) {
      const GrammarEdge& e = program_->edges[size_t(i)];
      if (e.kind == GrammarEdge::Kind::kBytes && e.low <= byte && byte <= e.high)
        work_.push_back(uint64_t(uint32_t(e.to)) << 32 | uint32_t(item));
    }
  }
  const int32_t next = work_.empty() ? kDead : Intern(&work_);
  states_[size_t(state)].next[byte] = next;
  return next;
}

int32_t Automaton::NextByToken(int32_t state, int32_t token) {
  if (!states_[size_t(state)].has_token_edges) return kDead;
  work_.clear();
  for (const Item item : states_[size_t(state)].items) {
    const size_t node = size_t(item >> 32);
    for (int32_t i = program_->edge_begin[node]; i < program_->edge_begin[node + 1]; ++i) {
      const GrammarEdge& e = program_->edges[size_t(i)];
      if (e.kind == GrammarEdge::Kind::kToken && e.id == token)
        work_.push_back(uint64_t(uint32_t(e.to)) << 32 | uint32_t(item));
    }
  }
  return work_.empty() ? kDead : Intern(&work_);
}

int32_t Automaton::AfterToken(int32_t state, int32_t token, std::string_view bytes) {
  {
    std::lock_guard lock(mutex_);
    if (const int32_t next = NextByToken(state, token); next != kDead) return next;
  }
  return bytes.empty() ? kDead : AfterBytes(state, bytes);
}

int32_t Automaton::AfterBytes(int32_t state, std::string_view bytes) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < bytes.size() && state != kDead; ++i) state = Next(state, uint8_t(bytes[i]));
  return state;
}

bool Automaton::Accepts(int32_t state) const {
  std::lock_guard lock(mutex_);
  return states_[size_t(state)].accepts;
}

int32_t Automaton::BytesLeft(int32_t state) const {
  std::lock_guard lock(mutex_);
  return states_[size_t(state)].bytes_left;
}

Automaton::Only Automaton::OnlyNext(int32_t state, int32_t* value) const {
  const State& s = states_[size_t(state)];
  if (s.items.empty()) return Only::kEnd;
  if (s.accepts) return Only::kOpen;
  Only only = Only::kEnd;
  for (const Item item : s.items) {
    const size_t node = size_t(item >> 32);
    for (int32_t i = program_->edge_begin[node]; i < program_->edge_begin[node + 1]; ++i) {
      const GrammarEdge& e = program_->edges[size_t(i)];
      if (e.kind != GrammarEdge::Kind::kBytes && e.kind != GrammarEdge::Kind::kToken) continue;
      const bool byte = e.kind == GrammarEdge::Kind::kBytes;
      const int32_t is = byte ? e.low : e.id;
      const Only kind = byte ? Only::kByte : Only::kToken;
      if ((byte && e.low != e.high) || (only != Only::kEnd && (only != kind || *value != is)))
        return Only::kOpen;
      only = kind;
      *value = is;
    }
  }
  return only;
}

int32_t Automaton::ForcedToken(int32_t state) {
  if (first_token_ == nullptr) return -1;
  std::lock_guard lock(mutex_);
  if (const int32_t known = states_[size_t(state)].forced; known != -2) return known;
  std::string text;
  int32_t value = -1, at = state;
  Only only = OnlyNext(at, &value);
  while (only == Only::kByte && text.size() < kForcedBytesMax) {
    text += char(value);
    at = Next(at, uint8_t(value));
    if (at == kDead) break;
    only = OnlyNext(at, &value);
  }
  int32_t token = -1;
  if (text.empty()) {
    if (only == Only::kToken) token = value;
  } else if (at != kDead) {
    token = first_token_(text, /*more=*/only == Only::kByte || only == Only::kOpen);
  }
  states_[size_t(state)].forced = token;
  return token;
}

bool Automaton::Full() const {
  std::lock_guard lock(mutex_);
  return states_.size() > kStatesMax;
}

bool Automaton::Deep(int32_t state) const {
  std::lock_guard lock(mutex_);
  return states_[size_t(state)].depth >= kStackDeep;
}

bool Automaton::MustWatch(int32_t state, int32_t tokens_left) const {
  // A token enters a few rules at most; what it must take along is in the state's own length already.
  const int64_t reach = int64_t(BytesLeft(state)) + 4 * int64_t(program_->longest_rule) + 64;
  return tokens_left < reach;
}

template <typename Visit>
void Automaton::Walk(int32_t state, Visit visit) {
  if (states_[size_t(state)].has_token_edges) {
    for (const Item item : std::vector<Item>(states_[size_t(state)].items)) {
      const size_t node = size_t(item >> 32);
      for (int32_t i = program_->edge_begin[node]; i < program_->edge_begin[node + 1]; ++i) {
        const GrammarEdge& e = program_->edges[size_t(i)];
        if (e.kind != GrammarEdge::Kind::kToken) continue;
        if (const int32_t next = NextByToken(state, e.id); next != kDead) visit(e.id, next);
      }
    }
  }
  const std::vector<TokenTrie::Node>& nodes = trie_->nodes();
  path_[0] = state;
  for (size_t i = 0; i < nodes.size();) {
    const TokenTrie::Node& node = nodes[i];
    const int32_t from = path_[size_t(node.depth) - 1];
    int32_t next = states_[size_t(from)].next[node.byte];
    if (next == kUnknown) next = Next(from, node.byte);
    if (next == kDead) {
      i = size_t(node.skip);
      continue;
    }
    path_[node.depth] = next;
    if (node.token >= 0) visit(node.token, next);
    ++i;
  }
}

std::shared_ptr<const TokenMask> Automaton::MaskIfReady(int32_t state) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  return lock.owns_lock() ? states_[size_t(state)].mask : nullptr;
}

std::shared_ptr<const TokenMask> Automaton::Mask(int32_t state) {
  std::lock_guard lock(mutex_);
  if (auto mask = states_[size_t(state)].mask) return mask;
  auto mask = std::make_shared<TokenMask>(size_t(CeilDiv(trie_->vocab_size(), 64)), 0);
  Walk(state, [&](int32_t token, int32_t) { SetBit(mask.get(), token); });
  for (const auto& [token, twin] : trie_->doubles()) {
    if ((*mask)[size_t(token) / 64] >> (token % 64) & 1) SetBit(mask.get(), twin);
  }
  states_[size_t(state)].mask = mask;
  return mask;
}

std::shared_ptr<const TokenMask> Automaton::ClosingMask(int32_t state, int32_t bytes_max) {
  std::lock_guard lock(mutex_);
  const size_t words = size_t(CeilDiv(trie_->vocab_size(), 64));
  auto mask = std::make_shared<TokenMask>(words, 0), best = std::make_shared<TokenMask>(words, 0);
  int32_t fewest = kUnreachable;
  bool any = false;
  Walk(state, [&](int32_t token, int32_t behind) {
    const int32_t left = states_[size_t(behind)].bytes_left;
    if (left <= bytes_max) {
      SetBit(mask.get(), token);
      any = true;
    }
    if (left < fewest) {
      fewest = left;
      std::fill(best->begin(), best->end(), 0);
    }
    if (left == fewest) SetBit(best.get(), token);
  });
  return any || states_[size_t(state)].accepts ? mask : best;
}

int32_t Automaton::MoveTo(int32_t state, Automaton* other) const {
  std::vector<std::pair<int32_t, std::vector<int32_t>>> flat;  // node, return nodes from the bottom up
  {
    std::lock_guard lock(mutex_);
    for (const Item item : states_[size_t(state)].items) {
      std::vector<int32_t> stack;
      for (int32_t s = int32_t(uint32_t(item)); s != 0; s = stacks_[size_t(s)].parent)
        stack.push_back(stacks_[size_t(s)].node);
      std::reverse(stack.begin(), stack.end());
      flat.emplace_back(int32_t(item >> 32), std::move(stack));
    }
    if (states_[size_t(state)].accepts) {
      flat.emplace_back(program_->rules[size_t(program_->root)].end, std::vector<int32_t>());
    }
  }
  std::lock_guard lock(other->mutex_);
  std::vector<Item> items;
  for (const auto& [node, stack] : flat) {
    int32_t id = 0;
    for (const int32_t n : stack) id = other->Push(n, id);
    items.push_back(uint64_t(uint32_t(node)) << 32 | uint32_t(id));
  }
  return other->Intern(&items);
}

}  // namespace sluice
