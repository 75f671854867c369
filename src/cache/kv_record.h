// Records of what the cache did, for --debug-kv: one line each, under the name that the scheduler gave the
// sequence (SequenceKv::label).
//
// Enough to tell where a request's rows came from, and no more: tokens appear as length and hash, pages as
// count, first, last and hash. The hash is keyed by the process, so that nobody finds a prompt by trying.
// Lines are bounded in length and by a rate; what was left out is told with the next line. One thread each.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "base/clock.h"
#include "fmt/format.h"
#include "request/request.h"

namespace sluice {

struct KvRecordLimits {
  int64_t burst = 256;        // lines at once
  double per_second = 100;    // on average
  size_t label_bytes = 64;    // of a request's name
  size_t owners_kept = 4096;  // nodes whose request is remembered
};

class KvRecorder {
 public:
  // `clock` outlives it. `write` gets a line without its end.
  KvRecorder(const Clock* clock, std::function<void(const std::string&)> write, KvRecordLimits limits = {});

  void Match(std::string_view label, std::span<const int32_t> tokens, const CachedTokens& hit);
  void Load(std::string_view label, int64_t op, std::span<const int32_t> device,
            std::span<const int32_t> host);
  void Prefetch(std::string_view label, std::span<const int32_t> tokens, int64_t from_page, int64_t pages);
  // Pages of an unfinished sequence that became the tree's; `swapped` of them were there already.
  void Insert(std::string_view label, uint64_t node, std::span<const int32_t> tokens, int64_t from_page,
              std::span<const int32_t> pages, int64_t swapped);
  void BackupAttach(uint64_t node, int64_t op, std::span<const int32_t> device,
                    std::span<const int32_t> host);
  void BackupCommit(uint64_t node, int64_t op, bool ok, int64_t pages);
  void Evict(uint64_t node, std::string_view tier, std::span<const int32_t> pages);

  // Transfers between instances. One chunk of a room: the prompt's pages that it registered, those of them
  // that rank `lane` owns, and their destinations. Of decode: pages reserved for a room.
  void SendChunk(std::string_view label, int64_t start, int64_t end, int32_t from_page, int32_t end_page,
                 int32_t lane, std::span<const int32_t> kept, std::span<const int32_t> destination);
  void Reserve(std::string_view label, int32_t from_page, std::span<const int32_t> pages);

  int64_t left_out() const { return left_out_total_; }

 private:
  // False: the rate is used up, and the line is counted as left out.
  bool Admit();
  void Write(std::string_view label, std::string text);
  std::string_view OwnerOf(uint64_t node) const;
  std::string TokensText(std::span<const int32_t> tokens) const;
  std::string PagesText(std::span<const int32_t> pages) const;

  const Clock* clock_;
  const std::function<void(const std::string&)> write_;
  const KvRecordLimits limits_;
  const uint64_t seed_;
  double allowance_;
  Nanos last_ = 0;
  int64_t left_out_ = 0, left_out_total_ = 0;
  absl::flat_hash_map<uint64_t, std::string> owner_;  // node > who inserted its last page
};

}  // namespace sluice
