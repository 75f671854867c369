#include "weights/checkpoint.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "base/file_text.h"
#include "config/index_schedule.h"
#include "simdjson.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
// What a tensor that does not fit the config leaves to do.
constexpr std::string_view kOtherModel =
    "take weights and config.json from one model, and check --json-model-override-args";
constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kHead = "lm_head.weight", kEmbedding = "model.embed_tokens.weight";

bool EndsWith(std::string_view s, std::string_view tail) {
  return s.size() >= tail.size() && s.substr(s.size() - tail.size()) == tail;
}

// Layer number of "model.layers.<n>.", or -1.
int64_t LayerOf(std::string_view name) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (name.substr(0, kPrefix.size()) != kPrefix) return -1;
  int64_t n = 0;
  size_t i = kPrefix.size();
  for (; i < name.size() && name[i] >= '0' && name[i] <= '9' && n < 1000000; ++i)
    n = n * 10 + (name[i] - '0');
  return i > kPrefix.size() && i < name.size() && name[i] == '.' ? n : -1;
}

Status CheckScales(std::string_view name, const std::string& file, const std::vector<float>& scales) {
  for (size_t i = 0; i < scales.size(); ++i) {
    if (!std::isfinite(scales[i]) || scales[i] < 0) {
      return Invalid(
          "{}: tensor \"{}\": scale {} is {}; scales must be finite and not negative (fetch the file again)",
          file, name, i, scales[i]);
    }
  }
  return OkStatus();
}

// e4m3 has two NaN codes, 0x7f and 0xff. Returns the index of the first, or -1.
int64_t FindNanByte(const uint8_t* p, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t v = 0;
    std::memcpy(&v, p + i, 8);
    // A byte is NaN when its low seven bits are all set: adding 1 to them carries into bit 7.
    if ((((v & 0x7f7f7f7f7f7f7f7full) + 0x0101010101010101ull) & 0x8080808080808080ull) != 0) break;
  }
  for (; i < n; ++i) {
    if ((p[i] & 0x7f) == 0x7f) return i;
  }
  return -1;
}

}  // namespace

float F16ToF32(uint16_t h) {
  const int e = (h >> 10) & 31, m = h & 1023;
  float v = 0;
  if (e == 31) {
    v = m == 0 ? INFINITY : NAN;
  } else {
    v = e == 0 ? std::ldexp(float(m), -24) : std::ldexp(float(1024 + m), e - 25);
  }
  return h & 0x8000 ? -v : v;
}

void WidenToF32(DType dtype, const void* data, int64_t n, float* out) {
  const auto* p = static_cast<const std::byte*>(data);
  if (dtype == DType::kF32) {
    std::memcpy(out, p, size_t(n) * 4);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (dtype == DType::kF8E4M3) {
      out[i] = E4M3ToF32(uint8_t(p[i]));
      continue;
    }
    uint16_t h = 0;
    std::memcpy(&h, p + 2 * i, 2);
    out[i] = dtype == DType::kBF16 ? BF16ToF32(h) : F16ToF32(h);
  }
}

Checkpoint::~Checkpoint() {
  if (arena_ != nullptr) munmap(arena_, arena_bytes_);
}

StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& folder) {
  std::error_code ec;
  if (!fs::is_directory(folder, ec))
    return NotFound("{}: not a folder; give a folder with config.json and safetensors files", folder);
  std::unique_ptr<Checkpoint> c(new Checkpoint());
  c->source_ = folder;
  const std::string index = folder + "/" + std::string(kIndexName);
  if (fs::exists(index, ec)) {
    RETURN_IF_ERROR(c->ReadIndexFile(folder, index));
    return c;
  }
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder, ec)) {
    if (entry.path().extension() == ".safetensors") found.push_back(entry.path().filename().string());
  }
  if (std::find(found.begin(), found.end(), "model.safetensors") != found.end())
    found = {"model.safetensors"};
  if (found.empty()) return NotFound("{}: no *.safetensors file; give a Hugging Face model folder", folder);
  if (found.size() > 1)
    return Invalid("{}: {} *.safetensors files but no {}; fetch the index file too", folder, found.size(),
                   kIndexName);
  RETURN_IF_ERROR(c->AddFile(folder + "/" + found[0]));
  return c;
}

Status Checkpoint::ReadIndexFile(const std::string& folder, const std::string& index_path) {
  simdjson::dom::parser parser;  // a large model has 100,000 entries
  simdjson::dom::element root;
  simdjson::dom::object entries;
  ASSIGN_OR_RETURN(const std::string text, ReadFileText(index_path));
  if (const auto error = parser.parse(text).get(root)) {
    return Invalid("{}: cannot be read as JSON: {} (fetch the file again)", index_path,
                   simdjson::error_message(error));
  }
  if (root["weight_map"].get(entries) != simdjson::SUCCESS) {
    return Invalid("{}: \"weight_map\" is missing or not an object (fetch the file again)", index_path);
  }
  absl::flat_hash_map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  for (const auto& [tensor, value] : entries) {
    std::string_view shard;
    if (value.get(shard) != simdjson::SUCCESS) {
      return Invalid("{}: shard of \"{}\" is not a string (fetch the file again)", index_path, tensor);
    }
    const std::string name(shard);
    if (name.empty() || name == "." || name == ".." ||
        name.find_first_of(std::string_view("/\\\0", 3)) != name.npos) {
      return Invalid(
          "{}: shard \"{}\" of tensor \"{}\" lies outside the model folder; shards must be plain file names",
          index_path, name, tensor);
    }
    if (!shard_of.emplace(tensor, name).second)
      return Invalid("{}: tensor \"{}\" is listed twice (fetch the file again)", index_path, tensor);
    shards.insert(name);
  }
  if (shards.empty()) return Invalid("{}: \"weight_map\" is empty (fetch the file again)", index_path);
  for (const std::string& shard : shards) {
    std::error_code ec;
    if (!fs::exists(folder + "/" + shard, ec)) {
      return NotFound("{}: names shard \"{}\", which is not in {}; fetch the missing file", index_path, shard,
                      folder);
    }
    RETURN_IF_ERROR(AddFile(folder + "/" + shard));
  }
  for (const auto& [tensor, shard] : shard_of) {
    const StoredTensor* t = Find(tensor);
    const std::string path = folder + "/" + shard;
    if (t == nullptr) {
      return Invalid("{}: tensor \"{}\" is not in its shard {} (fetch the index and that shard again)",
                     index_path, tensor, path);
    }
    if (t->file != path) {
      return Invalid("{}: tensor \"{}\" is in {}, not in {} (fetch the index file again)", index_path, tensor,
                     t->file, path);
    }
  }
  for (const StoredTensor& t : tensors_) {
    if (!shard_of.contains(t.name)) {
      return Invalid("{}: tensor \"{}\" is not in the index file {} (fetch both files again)", t.file, t.name,
                     index_path);
    }
  }
  return OkStatus();
}

Status Checkpoint::AddFile(const std::string& path) {
  ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
  for (const StoredTensor& t : file->tensors()) {
    const auto [it, inserted] = by_name_.emplace(t.name, tensors_.size());
    if (!inserted) {
      return Invalid("{}: tensor \"{}\" is already in {}; each tensor must be in one shard", path, t.name,
                     tensors_[it->second].file);
    }
    tensors_.push_back(t);
  }
  files_.push_back(std::move(file));
  return OkStatus();
}

const StoredTensor* Checkpoint::Find(std::string_view name) const {
  const auto it = by_name_.find(std::string(name));
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

Status Checkpoint::CheckExpected(const ModelConfig& config, const ExpectedTensor& e) const {
  const StoredTensor* t = Find(e.name);
  if (t == nullptr) {
    if (e.indexer && e.layer.value < config.num_layers) {
      return Invalid(
          "{}: tensor \"{}\" is missing, but layer {} computes its own top-k by the index schedule {}; this "
          "checkpoint needs its own schedule (index_topk_freq, index_topk_pattern or indexer_types)",
          source_, e.name, e.layer.value, ScheduleString(config.index.computes));
    }
    if (e.layer == config.draft_layer()) {
      return Invalid("{}: tensor \"{}\" of the draft (MTP) layer is missing; serve without speculation",
                     source_, e.name);
    }
    return Invalid("{}: tensor \"{}\" is missing; {}", source_, e.name, kOtherModel);
  }
  if (t->shape != e.shape) {
    return Invalid("{}: tensor \"{}\" has shape {}, config.json asks for {}; {}", t->file, e.name,
                   ShapeString(t->shape), ShapeString(e.shape), kOtherModel);
  }
  const bool fp8 = t->dtype == DType::kF8E4M3;
  const bool is_float = t->dtype == DType::kF32 || t->dtype == DType::kBF16 || t->dtype == DType::kF16;
  if (!is_float && !(fp8 && e.role == TensorRole::kLinear)) {
    return Invalid("{}: tensor \"{}\" is {}; use a checkpoint where it is F32, BF16, F16{}", t->file, e.name,
                   t->dtype_name, e.role == TensorRole::kLinear ? " or block F8_E4M3" : "");
  }
  const std::string scale_name = e.name + "_scale_inv";
  const StoredTensor* s = Find(scale_name);
  if (!fp8) {
    if (s != nullptr)
      return Invalid("{}: tensor \"{}\" scales a weight that is {}, not F8_E4M3; {}", s->file, scale_name,
                     t->dtype_name, kOtherModel);
    return OkStatus();
  }
  if (s == nullptr)
    return Invalid("{}: tensor \"{}\" is F8_E4M3 but its scales \"{}\" are missing; {}", t->file, e.name,
                   scale_name, kOtherModel);
  if (config.quant_block_n == 0) {
    return Invalid(
        "{}: tensor \"{}\" is F8_E4M3 but config.json has no quantization_config with weight_block_size; {}",
        t->file, e.name, kOtherModel);
  }
  const std::vector<int64_t> want = {CeilDiv(e.shape[0], config.quant_block_n),
                                     CeilDiv(e.shape[1], config.quant_block_k)};
  if (s->shape != want) {
    return Invalid("{}: tensor \"{}\" has shape {}, expected {} for a {} weight in blocks of {}x{}; {}",
                   s->file, scale_name, ShapeString(s->shape), ShapeString(want), ShapeString(e.shape),
                   config.quant_block_n, config.quant_block_k, kOtherModel);
  }
  if (s->dtype != DType::kF32 && s->dtype != DType::kBF16) {
    return Invalid("{}: tensor \"{}\" is {}; use a checkpoint with F32 or BF16 scales", s->file, scale_name,
                   s->dtype_name);
  }
  return OkStatus();
}

Status Checkpoint::Validate(const ModelConfig& config, bool with_draft) {
  block_n_ = config.quant_block_n;
  block_k_ = config.quant_block_k;
  if (with_draft && config.num_draft_layers == 0) {
    return Invalid(
        "{}: speculation is on, but config.json has no draft layer (num_nextn_predict_layers); leave "
        "--speculative-algorithm out",
        source_);
  }
  absl::flat_hash_map<std::string, bool> known;
  for (const ExpectedTensor& e : ExpectedTensors(config, with_draft)) {
    RETURN_IF_ERROR(CheckExpected(config, e));
    known.emplace(e.name, true);
    if (e.role == TensorRole::kLinear) known.emplace(e.name + "_scale_inv", true);
  }
  std::set<int64_t> spare_indexers;
  int64_t draft_tensors = 0;
  notices_.clear();
  for (const StoredTensor& t : tensors_) {
    if (known.contains(t.name)) continue;
    const int64_t layer = LayerOf(t.name);
    if (layer >= config.num_layers && layer < config.num_layers + config.num_draft_layers) {
      // The draft layer when it is not wanted, draft layers after the first, and the first one's copies of
      // embedding and head.
      if (layer > config.num_layers || !with_draft || EndsWith(t.name, ".embed_tokens.weight") ||
          EndsWith(t.name, ".shared_head.head.weight")) {
        ++draft_tensors;
        continue;
      }
    }
    if (layer >= 0 && layer < config.num_layers && config.sparse() &&
        !config.IsFullIndexLayer(LogicalLayer(int32_t(layer))) &&
        t.name.find(kIndexerInfix) != std::string::npos) {
      spare_indexers.insert(layer);
      continue;
    }
    if (EndsWith(t.name, "rotary_emb.inv_freq"))
      continue;  // old checkpoints carry this buffer; it follows from the config
    if (t.name == kHead && config.tie_embeddings) {
      // A copy of the embedding is what the config says; another head would be dropped in silence.
      if (SameBytes(kHead, kEmbedding)) continue;
      return Invalid(
          "{}: tensor \"{}\" differs from \"{}\", but config.json says tie_word_embeddings: true; set it to "
          "false "
          "(--json-model-override-args '{{\"tie_word_embeddings\": false}}') or take the tensor out",
          t.file, t.name, kEmbedding);
    }
    return Invalid("{}: tensor \"{}\" is not part of {} with this config.json; {}", t.file, t.name,
                   config.architecture_name, kOtherModel);
  }
  if (!spare_indexers.empty()) {
    std::string list;
    for (int64_t l : spare_indexers) list += (list.empty() ? "" : ", ") + std::to_string(l);
    notices_.push_back(
        fmt::format("indexer weights of layers {} are not loaded: these layers reuse the top-k of the layer "
                    "before (schedule {})",
                    list, ScheduleString(config.index.computes)));
  }
  if (draft_tensors > 0 && !with_draft) {
    notices_.push_back(
        fmt::format("{} tensors of the draft (MTP) layer are not loaded: speculation is off", draft_tensors));
  }
  return OkStatus();
}

const void* Checkpoint::Aligned(const StoredTensor& t) {
  const size_t alignment = size_t(SizeOf(*t.dtype));
  if (reinterpret_cast<uintptr_t>(t.data) % alignment == 0) return t.data;
  copies_.push_back(std::make_unique<std::byte[]>(size_t(t.bytes)));
  std::memcpy(copies_.back().get(), t.data, size_t(t.bytes));
  return copies_.back().get();
}

StatusOr<StoredMatrix> Checkpoint::Matrix(std::string_view name) {
  const StoredTensor* t = Find(name);
  if (t == nullptr || t->shape.size() != 2 || !t->dtype)
    return Internal("tensor \"{}\" was not validated", name);
  StoredMatrix m;
  m.dtype = *t->dtype;
  m.out = t->shape[0];
  m.in = t->shape[1];
  m.data = Aligned(*t);
  if (m.dtype != DType::kF8E4M3) return m;
  const int64_t nan_at = FindNanByte(reinterpret_cast<const uint8_t*>(t->data), t->bytes);
  if (nan_at >= 0) {
    return Invalid(
        "{}: tensor \"{}\" holds NaN (byte 0x{:02x}) at element {}; the file is damaged or not e4m3fn (fetch "
        "it again)",
        t->file, name, unsigned(t->data[nan_at]), nan_at);
  }
  const std::string scale_name = std::string(name) + "_scale_inv";
  auto& scales = scales_[scale_name];
  if (scales.empty()) {
    const StoredTensor* s = Find(scale_name);
    if (s == nullptr) return Internal("tensor \"{}\" was not validated", scale_name);
    scales.resize(size_t(s->elements()));
    WidenToF32(*s->dtype, s->data, s->elements(), scales.data());
    RETURN_IF_ERROR(CheckScales(scale_name, s->file, scales));
  }
  m.scale = scales.data();
  m.block_n = block_n_;
  m.block_k = block_k_;
  return m;
}

StatusOr<std::vector<float>> Checkpoint::Vector(std::string_view name) {
  const StoredTensor* t = Find(name);
  if (t == nullptr || !t->dtype) return Internal("tensor \"{}\" was not validated", name);
  std::vector<float> v(size_t(t->elements()));
  WidenToF32(*t->dtype, t->data, t->elements(), v.data());
  return v;
}

StatusOr<std::vector<float>> Checkpoint::MatrixF32(std::string_view name) {
  ASSIGN_OR_RETURN(const StoredMatrix m, Matrix(name));
  std::vector<float> v(size_t(m.out * m.in));
  WidenToF32(m.dtype, m.data, m.out * m.in, v.data());
  if (m.scale != nullptr) {
    const int64_t blocks = CeilDiv(m.in, m.block_k);
    for (int64_t r = 0; r < m.out; ++r) {
      for (int64_t c = 0; c < m.in; ++c)
        v[size_t(r * m.in + c)] *= m.scale[r / m.block_n * blocks + c / m.block_k];
    }
  }
  return v;
}

int64_t Checkpoint::total_bytes() const {
  int64_t n = 0;
  for (const StoredTensor& t : tensors_) n += t.bytes;
  return n;
}

bool Checkpoint::SameBytes(std::string_view a, std::string_view b) const {
  const StoredTensor* x = Find(a);
  const StoredTensor* y = Find(b);
  return x != nullptr && y != nullptr && x->dtype_name == y->dtype_name && x->shape == y->shape &&
         std::memcmp(x->data, y->data, size_t(x->bytes)) == 0;
}

Digest256 Checkpoint::Identity(const ModelConfig& config) const {
  std::vector<const StoredTensor*> sorted;
  for (const StoredTensor& t : tensors_) sorted.push_back(&t);
  std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
  constexpr int64_t kSample = 64;
  Hasher h;
  h.AddFramed("sluice model identity 1");
  h.AddFramed(config.merged_json);
  h.AddU64(sorted.size());
  for (const StoredTensor* t : sorted) {
    h.AddFramed(t->name);
    h.AddFramed(t->dtype_name);
    h.AddU64(t->shape.size());
    for (int64_t d : t->shape) h.AddU64(uint64_t(d));
    const int64_t n = std::min(kSample, t->bytes);
    for (int64_t at : {int64_t(0), (t->bytes - n) / 2, t->bytes - n}) h.Add({t->data + at, size_t(n)});
  }
  return h.Finish();
}

void Checkpoint::DropFilePages() const {
  for (const auto& f : files_) f->DropResidentPages();
}

void Checkpoint::ReleaseMemory(std::string_view keep) {
  DropFilePages();
  if (arena_ == nullptr) return;
  const StoredTensor* kept = Find(keep);
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t end = AlignDown(int64_t(arena_bytes_), page);
  const int64_t from = kept == nullptr ? end : AlignDown(kept->data - arena_, page);
  const int64_t to = kept == nullptr ? end : std::min(end, AlignUp(kept->data + kept->bytes - arena_, page));
  if (from > 0) madvise(arena_, size_t(from), MADV_DONTNEED);
  if (to < end) madvise(arena_ + to, size_t(end - to), MADV_DONTNEED);
}

}  // namespace sluice
