#include "text/added_tokens.h"

#include <algorithm>

#include "text/utf8.h"

namespace sluice {
namespace {

size_t PreviousChar(std::string_view text, size_t end) {
  size_t begin = end - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

bool WordBefore(std::string_view text, size_t pos) {
  if (pos == 0) return false;
  return IsWordChar(DecodeUtf8(text, PreviousChar(text, pos)).codepoint);
}

bool WordAfter(std::string_view text, size_t pos) {
  return pos < text.size() && IsWordChar(DecodeUtf8(text, pos).codepoint);
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher() : nodes_(1) {}

int32_t AddedTokenMatcher::Child(int32_t node, unsigned char byte) const {
  for (const auto& [b, child] : nodes_[node].next) {
    if (b == byte) return child;
  }
  return -1;
}

void AddedTokenMatcher::Add(const AddedToken& token) {
  if (token.content.empty()) return;
  int32_t node = 0;
  for (const char c : token.content) {
    const auto byte = static_cast<unsigned char>(c);
    int32_t child = Child(node, byte);
    if (child < 0) {
      child = static_cast<int32_t>(nodes_.size());
      nodes_[node].next.emplace_back(byte, child);
      nodes_.emplace_back();
    }
    node = child;
  }
  if (nodes_[node].token < 0) nodes_[node].token = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
  starts_[static_cast<unsigned char>(token.content[0])] = true;
}

void AddedTokenMatcher::Find(std::string_view text, size_t begin, size_t end, size_t* floor,
                             std::vector<Match>* matches) const {
  if (tokens_.empty()) return;
  for (size_t pos = begin; pos < end;) {
    if (!starts_[static_cast<unsigned char>(text[pos])]) {
      ++pos;
      continue;
    }
    int32_t node = 0, longest = -1;
    for (size_t i = pos; i < end; ++i) {
      node = Child(node, static_cast<unsigned char>(text[i]));
      if (node < 0) break;
      if (nodes_[node].token >= 0) longest = nodes_[node].token;
    }
    if (longest < 0) {
      ++pos;
      continue;
    }
    const AddedToken& token = tokens_[longest];
    size_t from = pos, to = pos + token.content.size();
    pos = to;
    if (token.single_word && (WordBefore(text, from) || WordAfter(text, to))) continue;
    if (token.lstrip) {
      while (from > *floor) {
        const size_t previous = PreviousChar(text, from);
        if (!IsWhiteSpace(DecodeUtf8(text, previous).codepoint)) break;
        from = previous;
      }
    }
    from = std::max(from, *floor);
    if (token.rstrip) {
      while (to < text.size()) {
        const Utf8Step step = DecodeUtf8(text, to);
        if (!IsWhiteSpace(step.codepoint)) break;
        to += step.bytes;
      }
    }
    matches->push_back({from, std::max(from, to), token.id});
    *floor = matches->back().end;
  }
}

}  // namespace sluice
