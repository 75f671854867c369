// A program as a deterministic automaton over bytes whose states are made when they are first met, and the
// token masks of its states.
//
// A state is a set of (node, stack of nodes to return to). Stacks are shared and interned, so equal sets are
// one state: a schema without recursion has few states, however long the texts. Thread-safe; one lock.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "grammar/program.h"
#include "grammar/token_trie.h"

namespace sluice {

using TokenMask = std::vector<uint64_t>;  // bit t: token t is allowed

class Automaton {
 public:
  static constexpr int32_t kDead = -1;
  static constexpr size_t kStatesMax = 8192;  // then Full(): users move to a fresh automaton
  static constexpr int32_t kStackDeep = 256;  // nesting from where on only the way out is offered
  static constexpr int32_t kStackMax = 1024;  // never reached by the way out
  static constexpr size_t kForcedBytesMax = 128;

  // The first token of the tokenizer's own cut of a text; -1: it has none, or with `more` behind the text,
  // just one.
  using FirstToken = std::function<int32_t(std::string_view text, bool more)>;

  // Without first_token no token is forced.
  Automaton(std::shared_ptr<const Program> program, std::shared_ptr<const TokenTrie> trie,
            FirstToken first_token = nullptr);

  int32_t start() const { return start_; }
  // After a token: by the edge of that token, else by its bytes. kDead: not allowed.
  int32_t AfterToken(int32_t state, int32_t token, std::string_view bytes);
  int32_t AfterBytes(int32_t state, std::string_view bytes);
  bool Accepts(int32_t state) const;
  // Fewest bytes to an end.
  int32_t BytesLeft(int32_t state) const;
  // Tokens that keep an end possible; ends (stop tokens) are not in it. Kept: the same state, the same mask.
  std::shared_ptr<const TokenMask> Mask(int32_t state);
  // Null: not there yet, or somebody else works on this automaton right now.
  std::shared_ptr<const TokenMask> MaskIfReady(int32_t state);
  // Of those, the ones behind which at most `bytes_max` bytes lead to an end; when there are none, the ones
  // with the fewest, but none at all where the text may end here.
  std::shared_ptr<const TokenMask> ClosingMask(int32_t state, int32_t bytes_max);
  // Whether a token of this state could take the end further away than `tokens_left` allows.
  bool MustWatch(int32_t state, int32_t tokens_left) const;
  // Where only one text can go on, its tokens are the tokenizer's: the first one of that text (of at most
  // kForcedBytesMax bytes); -1 when nothing is forced. The last token of the text is free where other text
  // follows, which may be part of it, and forced where the end or a token of its own follows. Such a token is
  // forced as well.
  int32_t ForcedToken(int32_t state);
  bool Full() const;
  // Nested so far that only ways towards the end may be offered.
  bool Deep(int32_t state) const;
  // The same position in another automaton of the same program.
  int32_t MoveTo(int32_t state, Automaton* other) const;

 private:
  using Item = uint64_t;  // node << 32 | stack
  struct StackNode {
    int32_t node, parent, to_end, depth;
  };
  struct State {
    std::vector<Item> items;
    bool accepts = false;
    bool has_token_edges = false;
    int32_t bytes_left = kUnreachable;
    int32_t depth = 0;                // of the deepest stack
    std::unique_ptr<int32_t[]> next;  // [256]; -2: not known
    std::shared_ptr<const TokenMask> mask;
    int32_t forced = -2;  // ForcedToken; -2: not known
  };

  int32_t Push(int32_t node, int32_t parent);
  // items: any; closed over empty and rule edges, then interned.
  int32_t Intern(std::vector<Item>* items);
  int32_t Next(int32_t state, uint8_t byte);
  int32_t NextByToken(int32_t state, int32_t token);
  // What can come next: kByte: this byte alone; kToken: this token alone; kEnd: nothing; kOpen: several
  // things.
  enum class Only : uint8_t { kByte, kToken, kEnd, kOpen };
  Only OnlyNext(int32_t state, int32_t* value) const;
  template <typename Visit>
  void Walk(int32_t state, Visit visit);  // visit(token, state behind it)

  const std::shared_ptr<const Program> program_;
  const std::shared_ptr<const TokenTrie> trie_;
  const FirstToken first_token_;
  mutable std::mutex mutex_;
  std::vector<StackNode> stacks_;
  absl::flat_hash_map<uint64_t, int32_t> stack_ids_;
  std::deque<State> states_;
  absl::flat_hash_map<std::vector<Item>, int32_t> ids_;
  std::vector<int32_t> path_;  // scratch of a walk: state behind each byte
  std::vector<Item> work_;
  int32_t start_ = kDead;
};

}  // namespace sluice
