// sluice bench transfer: what the copies between tiers reach of a plain copy of the same bytes, in one run.
//
//   l1-l2, l2-l1   CopyPages, as the executor performs a CopyPlan, against memcpy of one run of the same
//   bytes. "run": pages in
//                  a row, as a fresh pool hands them out; "shuffled": page pairs in random order, nothing to
//                  merge
//   p-d            a room of a prefill node and a decode node in this process, handshake to completion, over
//   shm
//                  (against memcpy) and tcp (against a plain loopback connection)
//   hook           what a layer's report costs the thread that runs the forward, with 10 rooms in it
//   l3-read        the file backend's gets into the host pool against a loop of 1 MiB read() over the same
//   files into one
//                  buffer (what dd bs=1M does); warm = files in the page cache, cold = dropped from it before
//                  each round
//   l3-write       the file backend's puts against a loop of 1 MiB write() into one file a page (no ratio is
//   promised)
//
// Rounds alternate between the two; medians are reported.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <numeric>
#include <optional>
#include <thread>

#include "base/random.h"
#include "bench_peer.h"
#include "commands.h"
#include "config/model_config.h"
#include "fmt/format.h"
#include "kv/device_pool.h"
#include "kv/host_pool.h"
#include "kv/page_copy.h"
#include "nlohmann/json.hpp"
#include "storage/file_storage.h"
#include "transfer/ucx_transport.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

struct TransferOptions {
  std::string config;
  std::string kv_cache_dtype = "fp8_e4m3";
  std::vector<std::string> layouts = {"layer_first", "layer_page_first", "page_first_direct", "page_first"};
  std::vector<std::string> paths = {"l1-l2", "l2-l1", "p-d", "hook", "l3-read", "l3-write"};
  double megabytes = 512;
  int rounds = 5;
  std::string directory;
  std::string engine = "auto";
  int threads = 0;
  bool direct_io = false;
  std::string ucx_library;
  std::string json;
};

struct Row {
  std::string path, layout, order;
  int64_t bytes = 0;
  double gb_s = 0, baseline_gb_s = 0;
};

double Seconds(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + long(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// Alternates the two, after one untimed round of each; GB/s of the medians.
void Measure(int rounds, int64_t bytes, const std::function<void()>& before,
             const std::function<void()>& ours, const std::function<void()>& plain, Row* row) {
  std::vector<double> a, b;
  for (int r = 0; r <= rounds; ++r) {
    before();
    const double plain_s = Seconds(plain);
    before();
    const double ours_s = Seconds(ours);
    if (r == 0) continue;
    a.push_back(ours_s);
    b.push_back(plain_s);
  }
  row->bytes = bytes;
  row->gb_s = double(bytes) / Median(a) / 1e9;
  row->baseline_gb_s = double(bytes) / Median(b) / 1e9;
}

// The cache geometry of GLM-5: 78 layers, latent 512 + 64, index K 128 wide on every second layer.
ModelConfig Glm5Shape() {
  ModelConfig m;
  m.num_layers = 78;
  m.kv_lora_rank = 512;
  m.qk_rope = 64;
  m.index.num_heads = 32;
  m.index.head_dim = 128;
  m.index.topk = 2048;
  for (int64_t i = 0; i < m.num_layers; ++i) m.index.computes.push_back(i % 2 == 0);
  return m;
}

class PlainMemory {
 public:
  explicit PlainMemory(int64_t bytes) : bytes_(size_t(bytes)) {
    void* p = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base_ = p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
    if (base_ != nullptr) (void)::madvise(p, bytes_, MADV_HUGEPAGE);  // as the pools do
  }
  ~PlainMemory() {
    if (base_ != nullptr) ::munmap(base_, bytes_);
  }
  std::byte* get() const { return base_; }

 private:
  size_t bytes_;
  std::byte* base_ = nullptr;
};

Status BenchCopies(const TransferOptions& o, const KvLayout& layout, int64_t pages, std::vector<Row>* rows) {
  const int64_t bytes = pages * layout.page_bytes();
  ASSIGN_OR_RETURN(auto device, DevicePool::Make(layout, 1, pages + 1));
  PlainMemory from(bytes), to(bytes);
  if (from.get() == nullptr || to.get() == nullptr)
    return Exhausted("--megabytes: no memory for {} bytes twice", bytes);
  for (int64_t p = 1; p <= pages; ++p)
    for (const KvPiece& piece : layout.pieces())
      std::memset(device->Piece(piece, PageId(int32_t(p))), int(p), size_t(piece.bytes));
  std::memset(from.get(), 1, size_t(bytes));
  for (const std::string& name : o.layouts) {
    ASSIGN_OR_RETURN(const HostLayout order, ParseHostLayout(name));
    ASSIGN_OR_RETURN(auto host, HostPool::Make(layout, order, 1, pages));
    for (const char* shuffle : {"run", "shuffled"}) {
      CopyPlan plan;
      std::vector<int32_t> host_pages(size_t(pages), 0);
      std::iota(host_pages.begin(), host_pages.end(), 0);
      std::vector<int32_t> device_pages = host_pages;
      SeededStream random(1);
      if (shuffle[0] == 's')
        for (auto* v : {&host_pages, &device_pages})
          for (size_t i = v->size(); i > 1; --i) std::swap((*v)[i - 1], (*v)[random.Below(i)]);
      for (size_t i = 0; i < host_pages.size(); ++i)
        plan.pages.push_back({PageId(device_pages[i] + 1), HostPageId(host_pages[i])});
      for (const auto& [path, direction] : {std::pair("l1-l2", CopyDirection::kDeviceToHost),
                                            std::pair("l2-l1", CopyDirection::kHostToDevice)}) {
        if (std::find(o.paths.begin(), o.paths.end(), path) == o.paths.end()) continue;
        plan.direction = direction;
        Row row{path, name, shuffle};
        Measure(
            o.rounds, bytes, [] {}, [&] { CopyPages(plan, *device, *host, -1); },
            [&] { std::memcpy(to.get(), from.get(), size_t(bytes)); }, &row);
        rows->push_back(row);
      }
    }
  }
  return OkStatus();
}

// A private folder that goes away at the end.
class Scratch {
 public:
  explicit Scratch(std::string parent) {
    path_ =
        (parent.empty() ? fs::temp_directory_path().string() : std::move(parent)) + "/sluice-bench-XXXXXX";
    made_ = ::mkdtemp(path_.data()) != nullptr;
  }
  ~Scratch() {
    std::error_code ignored;
    if (made_) fs::remove_all(path_, ignored);
  }
  bool made() const { return made_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool made_ = false;
};

class StorageBench {
 public:
  StorageBench(const KvLayout& layout, int64_t pages, HostPool* host)
      : layout_(layout), pages_(pages), host_(host) {
    format_.content_fingerprint = layout.content_fingerprint();
    for (const KvPiece& piece : layout.pieces()) format_.piece_bytes.push_back(uint32_t(piece.bytes));
  }
  Status Open(const TransferOptions& o, const std::string& directory) {
    FileStorageOptions options;
    options.directory = directory;
    options.threads = o.threads;
    options.direct_io = o.direct_io;
    options.engine = o.engine == "io_uring"  ? FileEngine::kUring
                     : o.engine == "threads" ? FileEngine::kThreads
                                             : FileEngine::kAuto;
    storage_.reset();
    ASSIGN_OR_RETURN(storage_, FileStorage::Open(format_, options));
    return OkStatus();
  }
  void Run(StorageOp op) {  // in batches of 128 pages, like the cache
    int64_t waiting = 0;
    for (int64_t from = 0; from < pages_; from += 128) {
      StorageBatch batch;
      batch.op = op;
      for (int64_t p = from; p < std::min(pages_, from + 128); ++p) {
        StorageItem item;
        std::memcpy(item.key.data(), &p, sizeof(p));
        item.key[8] = uint8_t(p * 37);
        host_->AppendSpans(HostPageId(int32_t(p)), &item.spans);
        batch.items.push_back(std::move(item));
      }
      if (auto t = storage_->Submit(std::move(batch)); !t.ok())
        status_ = t.status();
      else
        ++waiting;
    }
    std::vector<StorageCompletion> done;
    while (waiting > 0) {
      done.clear();
      waiting -= int64_t(storage_->Poll(&done, 64));
      if (done.empty()) std::this_thread::sleep_for(std::chrono::microseconds(50));
      for (const auto& c : done)
        for (const StorageOutcome outcome : c.outcomes)
          if (outcome != StorageOutcome::kOk) status_ = Unavailable("storage: {}", Name(outcome));
    }
  }
  const Status& status() const { return status_; }
  std::string Describe() const { return storage_->Describe(); }

 private:
  const KvLayout& layout_;
  const int64_t pages_;
  HostPool* host_;
  StorageFormat format_;
  std::unique_ptr<FileStorage> storage_;
  Status status_;
};

std::vector<std::string> ObjectFiles(const std::string& directory, int64_t page_bytes) {
  std::vector<std::string> files;
  for (const auto& e : fs::recursive_directory_iterator(directory))
    if (e.is_regular_file() && int64_t(e.file_size()) > page_bytes) files.push_back(e.path());
  return files;
}

void DropFromPageCache(const std::vector<std::string>& files) {
  for (const std::string& f : files) {
    const int fd = ::open(f.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    ::fdatasync(fd);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
}

Status BenchStorage(const TransferOptions& o, const KvLayout& layout, int64_t pages, std::vector<Row>* rows,
                    std::string* engine) {
  const int64_t bytes = pages * layout.page_bytes();
  const bool read = std::find(o.paths.begin(), o.paths.end(), "l3-read") != o.paths.end();
  const bool write = std::find(o.paths.begin(), o.paths.end(), "l3-write") != o.paths.end();
  if (!read && !write) return OkStatus();
  Scratch scratch(o.directory);
  if (!scratch.made())
    return Unavailable("--directory: cannot make {}: {}", scratch.path(), std::strerror(errno));
  constexpr size_t kBlock = 1 << 20;
  PlainMemory block(kBlock);
  std::memset(block.get(), 1, kBlock);
  for (const std::string& name : o.layouts) {
    ASSIGN_OR_RETURN(const HostLayout order, ParseHostLayout(name));
    ASSIGN_OR_RETURN(auto host, HostPool::Make(layout, order, 1, pages));
    const auto memory = host->memory();
    for (size_t i = 0; i + 8 <= memory.size(); i += 8) {
      const uint64_t v = i * 0x9E3779B97F4A7C15ull;
      std::memcpy(memory.data() + i, &v, sizeof(v));
    }
    StorageBench bench(layout, pages, host.get());
    const std::string kv = scratch.path() + "/kv", plain = scratch.path() + "/plain";
    if (write) {
      Row row{"l3-write", name, "buffered"};
      Status opened;
      Measure(
          std::min(o.rounds, 2), bytes,
          [&] {
            fs::remove_all(kv);
            fs::remove_all(plain);
            fs::create_directory(plain);
            opened = bench.Open(o, kv);
          },
          [&] {
            if (opened.ok()) bench.Run(StorageOp::kPut);
          },
          [&] {
            for (int64_t p = 0; p < pages; ++p) {
              const int fd =
                  ::open((plain + "/" + std::to_string(p)).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
              for (int64_t left = layout.page_bytes(); left > 0;) {
                const ssize_t n = ::write(fd, block.get(), size_t(std::min<int64_t>(left, kBlock)));
                if (n <= 0) break;
                left -= n;
              }
              ::close(fd);
            }
          },
          &row);
      if (!opened.ok()) return opened;
      rows->push_back(row);
    }
    fs::remove_all(plain);
    if (!read) continue;
    if (Status s = bench.Open(o, kv); !s.ok()) return s;
    *engine = bench.Describe();
    bench.Run(StorageOp::kPut);
    if (!bench.status().ok()) return bench.status();
    const std::vector<std::string> files = ObjectFiles(kv, layout.page_bytes());
    const auto plain_read = [&] {
      for (const std::string& f : files) {
        const int fd = ::open(f.c_str(), O_RDONLY | O_CLOEXEC);
        while (::read(fd, block.get(), kBlock) > 0) {
        }
        ::close(fd);
      }
    };
    for (const bool cold : {false, true}) {
      Row row{"l3-read", name, cold ? "cold" : "warm"};
      Measure(
          cold ? std::min(o.rounds, 3) : o.rounds, bytes,
          [&] {
            if (cold) DropFromPageCache(files);
          },
          [&] { bench.Run(StorageOp::kGet); }, plain_read, &row);
      if (!bench.status().ok()) return bench.status();
      rows->push_back(row);
    }
    fs::remove_all(kv);
  }
  return OkStatus();
}

Status BenchPeers(const TransferOptions& o, const KvLayout& layout, int64_t pages, std::vector<Row>* rows) {
  if (std::find(o.paths.begin(), o.paths.end(), "p-d") == o.paths.end()) return OkStatus();
  const int64_t bytes = pages * layout.page_bytes();
  const Status ucx = transfer::UcxSupport(o.ucx_library);
  if (!ucx.ok()) std::cerr << "sluice bench transfer: no rows of ucx: " << Message(ucx) << "\n";
  PlainMemory from(bytes), to(bytes);
  std::memset(from.get(), 1, size_t(bytes));
  std::memset(to.get(), 2, size_t(bytes));
  ASSIGN_OR_RETURN(const auto plain, SocketBench::Make());
  for (const auto& [transport, order] :
       {std::pair("shm", "run"), std::pair("shm", "shuffled"), std::pair("tcp", "run"),
        std::pair("tcp", "shuffled"), std::pair("ucx", "run"), std::pair("ucx", "shuffled")}) {
    if (std::string_view(transport) == "ucx" && !ucx.ok()) continue;
    ASSIGN_OR_RETURN(const auto peers,
                     PeerBench::Make(layout, pages, transport, std::string_view(order) == "shuffled"));
    const bool shm = std::string_view(transport) == "shm";
    Row row{"p-d", transport, order};
    Status moved;
    Measure(
        o.rounds, bytes, [] {},
        [&] {
          if (const Status s = peers->Move(); !s.ok()) moved = s;
        },
        [&] {
          if (shm) {
            std::memcpy(to.get(), from.get(), size_t(bytes));
          } else {
            plain->Move(bytes);
          }
        },
        &row);
    if (!moved.ok()) return moved;
    rows->push_back(row);
  }
  return OkStatus();
}

StatusOr<int> Run(const TransferOptions& o) {
  ModelConfig model = Glm5Shape();
  std::string name = "GLM-5 cache shape";
  if (!o.config.empty()) {
    ASSIGN_OR_RETURN(model, LoadModelConfig(o.config, ModelOverrides{}));
    name = o.config;
  }
  KvLayoutOptions options;
  options.latent_dtype = o.kv_cache_dtype == "fp8_e4m3" ? DType::kF8E4M3
                         : o.kv_cache_dtype == "bf16"   ? DType::kBF16
                                                        : DType::kF32;
  options.index_dtype = options.latent_dtype;
  options.numerics_class = "bench";
  ASSIGN_OR_RETURN(const KvLayout layout, KvLayout::Make(model, options));
  const int64_t pages = std::max<int64_t>(4, int64_t(o.megabytes * 1e6) / layout.page_bytes());
  std::vector<Row> rows;
  std::string engine;
  if (Status s = BenchCopies(o, layout, pages, &rows); !s.ok()) return s;
  if (Status s = BenchPeers(o, layout, pages, &rows); !s.ok()) return s;
  std::optional<HookCost> hook;
  if (std::find(o.paths.begin(), o.paths.end(), "hook") != o.paths.end()) {
    ASSIGN_OR_RETURN(hook, MeasureHook(layout));
  }
  if (Status s = BenchStorage(o, layout, pages, &rows, &engine); !s.ok()) return s;

  if (!o.json.empty()) {
    Json doc;
    doc["config"] = name;
    doc["kv_cache_dtype"] = o.kv_cache_dtype;
    doc["page_bytes"] = layout.page_bytes();
    doc["pages"] = pages;
    doc["storage"] = engine;
    if (hook) doc["layer_hook"] = Json{{"us_per_layer", hook->us_per_layer}, {"us_p99", hook->us_p99}};
    doc["rows"] = Json::array();
    for (const Row& r : rows)
      doc["rows"].push_back(Json{{"path", r.path},
                                 {"layout", r.layout},
                                 {"order", r.order},
                                 {"bytes", r.bytes},
                                 {"gb_s", r.gb_s},
                                 {"baseline_gb_s", r.baseline_gb_s},
                                 {"ratio", r.gb_s / r.baseline_gb_s}});
    if (o.json == "-") {
      std::cout << doc.dump(2) << "\n";
    } else {
      std::ofstream out(o.json);
      if (!(out << doc.dump(2) << "\n")) return Unavailable("--json: cannot write {}", o.json);
    }
    return int(kExitOk);
  }
  std::cout << fmt::format("{}, {}: {} pages of {} bytes\n", name, o.kv_cache_dtype, pages,
                           layout.page_bytes());
  if (!engine.empty()) std::cout << engine << "\n";
  std::cout << fmt::format("\n{:<9} {:<18} {:<9} {:>8} {:>8} {:>14} {:>6}\n", "path", "layout", "order", "MB",
                           "GB/s", "plain copy GB/s", "ratio");
  for (const Row& r : rows)
    std::cout << fmt::format("{:<9} {:<18} {:<9} {:>8.0f} {:>8.2f} {:>14.2f} {:>6.2f}\n", r.path, r.layout,
                             r.order, double(r.bytes) / 1e6, r.gb_s, r.baseline_gb_s,
                             r.gb_s / r.baseline_gb_s);
  if (hook)
    std::cout << fmt::format(
        "\nlayer hook, 10 rooms of {} layers: {:.2f} us a layer, p99 of a call {:.2f} us\n",
        layout.latent_layers().size(), hook->us_per_layer, hook->us_p99);
  return int(kExitOk);
}

}  // namespace

int RunBenchTransfer(const std::vector<std::string>& args) {
  TransferOptions o;
  CLI::App app("Copies between tiers against a plain copy of the same bytes", "sluice bench transfer");
  app.option_defaults()->always_capture_default();
  app.add_option("--config", o.config, "a model folder; without it the cache shape of GLM-5")
      ->type_name("DIR");
  app.add_option("--kv-cache-dtype", o.kv_cache_dtype)->check(CLI::IsMember({"fp8_e4m3", "bf16", "float32"}));
  app.add_option("--layouts", o.layouts, "host layouts")->type_name("NAME")->delimiter(',');
  app.add_option("--paths", o.paths)
      ->delimiter(',')
      ->check(CLI::IsMember({"l1-l2", "l2-l1", "p-d", "hook", "l3-read", "l3-write"}));
  app.add_option("--megabytes", o.megabytes, "moved in each round")->check(CLI::Range(1.0, 1e6));
  app.add_option("--rounds", o.rounds)->check(CLI::Range(1, 1000));
  app.add_option("--directory", o.directory, "where the file backend writes; default the temporary folder")
      ->type_name("DIR");
  app.add_option("--engine", o.engine, "of the file backend")
      ->check(CLI::IsMember({"auto", "io_uring", "threads"}));
  app.add_option("--threads", o.threads, "of the file backend; 0: its default")->check(CLI::Range(0, 64));
  app.add_flag("--direct-io", o.direct_io, "O_DIRECT in the file backend");
  app.add_option("--disaggregation-ucx-library", o.ucx_library, "as of sluice serve")
      ->type_name("FILE")
      ->envname("SLUICE_UCX_LIBRARY");
  app.add_option("--json", o.json, "write one JSON document there, - for stdout")->type_name("FILE");
  if (const auto code = ParseWords(&app, "bench transfer", args)) return *code;
  const StatusOr<int> code = Run(o);
  return code.ok() ? *code : FailWith("bench transfer", code.status());
}

}  // namespace sluice
