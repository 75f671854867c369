// A key in flight: a view of whole pages of somebody's token array. Slicing is O(1) and copies nothing.
#pragma once

#include <cstdint>
#include <span>

#include "base/check.h"

namespace sluice {

class RadixKey {
 public:
  RadixKey() = default;
  // The whole pages of `tokens`; a partial last page is not part of the key.
  RadixKey(std::span<const int32_t> tokens, int32_t page_tokens)
      : data_(tokens.data()), pages_(int64_t(tokens.size()) / page_tokens), page_tokens_(page_tokens) {}

  int64_t pages() const { return pages_; }
  bool empty() const { return pages_ == 0; }
  const int32_t* data() const { return data_; }
  const int32_t* page(int64_t i) const { return data_ + i * page_tokens_; }
  int32_t page_tokens() const { return page_tokens_; }

  // REQUIRES 0 <= from <= to <= pages().
  RadixKey Slice(int64_t from, int64_t to) const {
    SLUICE_DCHECK(0 <= from && from <= to && to <= pages_, "[{}, {}) of {}", from, to, pages_);
    RadixKey k;
    k.data_ = data_ + from * page_tokens_;
    k.pages_ = to - from;
    k.page_tokens_ = page_tokens_;
    return k;
  }
  RadixKey From(int64_t from) const { return Slice(from, pages_); }

 private:
  const int32_t* data_ = nullptr;
  int64_t pages_ = 0;
  int32_t page_tokens_ = 1;
};

}  // namespace sluice
