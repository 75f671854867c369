#include "kv/page_copier.h"

#include <algorithm>

#include "base/check.h"

namespace sluice {
namespace {

constexpr int64_t kLeastIndexWords = 8192;

std::string_view Name(IoBackend backend) { return backend == IoBackend::kDirect ? "direct" : "kernel"; }

Status OutsideOf(const char* pool, int64_t page, int64_t pages) {
  return Invalid("direct copy: {} page {} is outside of the {} pages of its pool", pool, page, pages);
}

}  // namespace

StatusOr<IoBackend> ParseIoBackend(std::string_view name) {
  if (name == "direct") return IoBackend::kDirect;
  if (name == "kernel") return IoBackend::kKernel;
  return Invalid("--hicache-io-backend: {} is unknown; use direct or kernel", name);
}

StatusOr<DirectCopier> DirectCopier::Make(const DevicePool& device, const HostPool& host) {
  RETURN_IF_ERROR(CheckHostLayout(host.order(), Name(IoBackend::kDirect)));
  return DirectCopier(device, host);
}

StatusOr<CopyCount> DirectCopier::Copy(CopyDirection direction, std::span<const int64_t> device_pages,
                                       std::span<const int64_t> host_pages, LogicalLayer layer) const {
  if (device_pages.size() != host_pages.size())
    return Invalid("direct copy: {} device pages and {} host pages", device_pages.size(), host_pages.size());
  if (const DeviceMemory* memory = device_->memory();
      memory != nullptr && (memory->Holds(device_pages.data()) || memory->Holds(host_pages.data())))
    return Invalid(
        "direct copy: the list of page ids lies in device memory; --hicache-io-backend direct reads ids in "
        "host "
        "memory, use --hicache-io-backend kernel for lists on the device");
  const int64_t device_all = device_->pages_per_lane() * device_->lanes(),
                host_all = host_->pages_per_lane() * host_->lanes();
  for (size_t i = 0; i < device_pages.size(); ++i) {
    if (device_pages[i] < 0 || device_pages[i] >= device_all)
      return OutsideOf("device", device_pages[i], device_all);
    if (host_pages[i] < 0 || host_pages[i] >= host_all) return OutsideOf("host", host_pages[i], host_all);
    if (device_pages[i] % device_->lanes() != host_pages[i] % host_->lanes())
      return Invalid("direct copy: device page {} and host page {} lie on different lanes", device_pages[i],
                     host_pages[i]);
  }
  return CopyPageIds(direction, device_pages, host_pages, layer, *device_, *host_);
}

StatusOr<KernelCopier> KernelCopier::Make(const DevicePool& device, const HostPool& host) {
  RETURN_IF_ERROR(CheckHostLayout(host.order(), Name(IoBackend::kKernel)));
  if (device.memory() == nullptr)
    return Unsupported("kernel copies: the pool lies in host memory, where no device reads index lists");
  return KernelCopier(device, host);
}

StatusOr<CopyCount> KernelCopier::Copy(CopyDirection direction, int32_t lane, const int32_t* device_index,
                                       const int32_t* host_index, int64_t count, LogicalLayer layer) const {
  CopyCount done;
  if (count == 0) return done;
  DeviceMemory& memory = *device_->memory();
  if (!memory.Holds(device_index) || !memory.Holds(host_index))
    return Invalid(
        "kernel copy: the list of page indices lies in host memory; --hicache-io-backend kernel reads lists "
        "on "
        "the device, use --hicache-io-backend direct for lists in host memory");
  static thread_local std::vector<IndexedPages> copies;
  copies.clear();
  HostRun first[2], second[2];
  const bool more = host_->pages_per_lane() > 1;
  for (const KvPiece& piece : device_->layout().pieces()) {
    if (layer.valid() && piece.layer != layer) continue;
    const int runs = host_->Runs(piece, HostPageId(lane), first);
    if (more) host_->Runs(piece, HostPageId(lane + host_->lanes()), second);
    std::byte* slab = device_->Piece(piece, PageId(lane));
    for (int r = 0; r < runs; ++r) {
      IndexedPages c;
      const int64_t host_page = more ? second[r].host - first[r].host : 0;
      std::byte* at = slab + first[r].device_offset;
      const bool out = direction == CopyDirection::kDeviceToHost;
      c.src = out ? at : first[r].host;
      c.dst = out ? first[r].host : at;
      c.src_page = out ? piece.bytes : host_page;
      c.dst_page = out ? host_page : piece.bytes;
      c.src_index = out ? device_index : host_index;
      c.dst_index = out ? host_index : device_index;
      c.count = count;
      c.rows = first[r].count;
      c.row_bytes = first[r].bytes;
      c.src_row = out ? first[r].bytes : first[r].host_stride;
      c.dst_row = out ? first[r].host_stride : first[r].bytes;
      copies.push_back(c);
      ++done.copies;
      done.bytes += count * c.rows * c.row_bytes;
    }
  }
  memory.CopyIndexed(copies);
  return done;
}

StatusOr<std::unique_ptr<PlanCopier>> PlanCopier::Make(IoBackend backend, const DevicePool& device,
                                                       const HostPool& host) {
  std::unique_ptr<PlanCopier> copier(new PlanCopier(device, host));
  RETURN_IF_ERROR(CheckHostLayout(host.order(), Name(backend)));
  if (device.memory() == nullptr) return copier;
  if (backend == IoBackend::kDirect) {
    ASSIGN_OR_RETURN(DirectCopier direct, DirectCopier::Make(device, host));
    copier->direct_ = std::make_unique<DirectCopier>(direct);
  } else {
    ASSIGN_OR_RETURN(KernelCopier kernel, KernelCopier::Make(device, host));
    copier->kernel_ = std::make_unique<KernelCopier>(kernel);
    copier->index_words_ = kLeastIndexWords;
    ASSIGN_OR_RETURN(copier->index_, device.memory()->Allocate(kLeastIndexWords * 4, "page index lists"));
  }
  return copier;
}

PlanCopier::~PlanCopier() = default;

void PlanCopier::Begin(std::span<const CopyPlan> plans) {
  plans_ = plans;
  if (kernel_ != nullptr) return Upload(plans);
  if (direct_ == nullptr) return;
  device_pages_.clear();
  host_pages_.clear();
  for (const CopyPlan& plan : plans) {
    for (const PagePair& pair : plan.pages) {
      device_pages_.push_back(pair.device.value);
      host_pages_.push_back(pair.host.value);
    }
  }
}

void PlanCopier::Upload(std::span<const CopyPlan> plans) {
  const int32_t lanes = device_.lanes();
  lists_.clear();
  staged_.clear();
  std::vector<int32_t>& to = staged_;
  int64_t pages = 0;
  for (const CopyPlan& plan : plans) pages += int64_t(plan.pages.size());
  to.resize(size_t(2 * pages));
  int64_t at = 0;
  for (const CopyPlan& plan : plans) {
    for (int32_t lane = 0; lane < lanes; ++lane) {
      LaneList list{plan.direction, lane, at, 0};
      for (const PagePair& pair : plan.pages) {
        if (pair.device.value % lanes != lane) continue;
        to[size_t(at)] = pair.device.value / lanes;
        to[size_t(pages + at)] = pair.host.value / lanes;
        ++at;
      }
      list.count = at - list.begin;
      if (list.count > 0) lists_.push_back(list);
    }
  }
  if (pages == 0) return;
  if (int64_t(to.size()) > index_words_) {
    const int64_t words = std::max<int64_t>(2 * index_words_, int64_t(to.size()));
    auto made = device_.memory()->Allocate(words * 4, "page index lists");
    SLUICE_CHECK(made.ok(), "{}", Message(made.status()));
    index_ = *made;
    index_words_ = words;
  }
  device_.memory()->Copy(index_.get(), to.data(), int64_t(to.size()) * 4);
}

CopyCount PlanCopier::Layer(LogicalLayer layer) {
  CopyCount done;
  const auto add = [&](const StatusOr<CopyCount>& count) {
    SLUICE_CHECK(count.ok(), "{}", Message(count.status()));
    done += *count;
  };
  if (kernel_ != nullptr) {
    const auto* index = reinterpret_cast<const int32_t*>(index_.get());
    const int64_t pages = int64_t(staged_.size()) / 2;
    for (const LaneList& l : lists_)
      add(kernel_->Copy(l.direction, l.lane, index + l.begin, index + pages + l.begin, l.count, layer));
    return done;
  }
  size_t at = 0;
  for (const CopyPlan& plan : plans_) {
    if (direct_ != nullptr) {
      const size_t n = plan.pages.size();
      add(direct_->Copy(plan.direction, std::span(device_pages_).subspan(at, n),
                        std::span(host_pages_).subspan(at, n), layer));
      at += n;
    } else if (layer.valid()) {
      done += CopyLayer(plan, layer, device_, host_, -1);
    } else {
      done += CopyPages(plan, device_, host_, -1);
    }
  }
  return done;
}

}  // namespace sluice
