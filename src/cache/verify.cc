// Hits computed a second time: which ones, and what a difference means.
#include <cstring>

#include "cache/kv_cache_impl.h"
#include "kv/device_pool.h"

namespace sluice {
namespace {
constexpr size_t kVerifyQueue = 16;  // beyond: the oldest goes, its pages are the likeliest to be gone
}

void KvCacheImpl::ChooseForVerification(const SequenceKv& seq, std::span<const int32_t> tokens) {
  if (!verify_random_.Chance(options_.verify_share)) return;
  if (verify_queue_.size() == kVerifyQueue) {
    ++stats_.verify_skipped;
    verify_queue_.pop_front();
  }
  verify_queue_.push_back({seq.name_space, {tokens.begin(), tokens.begin() + seq.cached}});
}

bool KvCacheImpl::TakeVerification(VerifyJob* job) {
  if (verify_queue_.empty()) return false;
  *job = std::move(verify_queue_.front());
  verify_queue_.pop_front();
  return true;
}

// The rows of `seq` were computed without the cache; those that the tree holds for the same tokens must be
// the same bytes.
void KvCacheImpl::CompareFresh(const SequenceKv& seq, std::span<const int32_t> tokens) {
  SLUICE_CHECK(options_.verify_pool != nullptr, "verification without the pool");
  const int64_t pages = seq.computed / kPageTokens;
  RadixNode* root = tree_.FindRoot(seq.name_space);
  const Hit hit =
      root == nullptr ? Hit() : Measure(tree_.Walk(root, Key(tokens.first(size_t(pages * kPageTokens)))));
  stats_.verify_skipped += hit.device < pages ? 1 : 0;
  std::vector<RadixNode*> path;
  for (RadixNode* n = hit.match.node; n != nullptr && !n->is_root(); n = n->parent) path.push_back(n);
  for (auto it = path.rbegin(); it != path.rend(); ++it) {
    RadixNode* n = *it;
    if (n->load_op != 0) return;  // its bytes are on their way
    for (int32_t i = 0; i < n->resident[0] && n->start + i < hit.device; ++i) {
      std::string evidence;
      if (SamePage(seq, n->start + i, n->slots[0][i], &evidence)) {
        ++stats_.verified_pages;
        continue;
      }
      ++stats_.verify_differences;
      if (options_.bad_page != nullptr)
        options_.bad_page(
            fmt::format("{}; namespace of {} bytes, host copy {}, page dropped with what follows it",
                        evidence, seq.name_space.size(), i < n->host_ready ? "yes" : "no"));
      return DropBadPage(n, i);
    }
  }
}

bool KvCacheImpl::SamePage(const SequenceKv& seq, int64_t page, int32_t slot, std::string* evidence) const {
  const DevicePool& pool = *options_.verify_pool;
  const PageId mine = seq.pages[size_t(page)], theirs(slot);
  const LogicalLayer last = layout_.latent_layers().back();
  for (const KvPiece& piece : layout_.pieces()) {
    // The draft layer's row of position 0 is never written.
    if (layout_.options().with_draft && page == 0 && piece.layer == last) continue;
    const std::byte* a = pool.Piece(piece, theirs);
    const std::byte* b = pool.Piece(piece, mine);
    if (std::memcmp(a, b, size_t(piece.bytes)) == 0) continue;
    int64_t at = 0, differing = 0;
    while (a[at] == b[at]) ++at;
    for (int64_t i = at; i < piece.bytes; ++i) differing += a[i] != b[i];
    *evidence = fmt::format(
        "cached page {} of a prompt (device page {}) differs from its recomputation: layer {} {}, {} of {} "
        "bytes, "
        "first at byte {}: {:#04x} cached, {:#04x} computed",
        page, slot, piece.layer.value, piece.component == KvComponent::kLatent ? "latent" : "index",
        differing, piece.bytes, at, unsigned(a[at]), unsigned(b[at]));
    return false;
  }
  return true;
}

// Nothing matches the page or what follows it any more, in any tier of this process; storage is told too.
void KvCacheImpl::DropBadPage(RadixNode* node, int32_t in_node) {
  if (storage_ != nullptr) {
    StorageBatch batch;
    batch.op = StorageOp::kDelete;
    std::vector<RadixNode*> below = {node};
    for (size_t at = 0; at < below.size(); ++at) {
      RadixNode* n = below[at];
      for (int32_t i = at == 0 ? in_node : 0; i < n->pages; ++i)
        batch.items.push_back({tree_.Digest(n, i), {}});
      for (RadixNode* child : tree_.Children(n)) below.push_back(child);
    }
    if (const StatusOr<StorageTicket> ticket = storage_->Submit(std::move(batch)); ticket.ok()) {
      tickets_[*ticket] = {Ticket::Kind::kDelete, 0, 0, 0};
    } else {
      ++stats_.storage_errors;
    }
  }
  if (in_node > 0) SplitNode(node, in_node);
  tree_.Kill(node, [this](Tier tier, int32_t slot) { FreeSlot(tier, slot); });
}

}  // namespace sluice
