#include "weights/safetensors.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/container/flat_hash_set.h"
#include "base/file_text.h"
#include "simdjson.h"

namespace sluice {
namespace {

struct StoredType {
  std::string_view name;
  int64_t bytes;
  std::optional<DType> dtype;
};
const StoredType kStoredTypes[] = {
    {"F32", 4, DType::kF32},        {"BF16", 2, DType::kBF16}, {"F16", 2, DType::kF16},
    {"F8_E4M3", 1, DType::kF8E4M3}, {"I32", 4, DType::kI32},   {"I64", 8, DType::kI64},
    {"U8", 1, DType::kU8},          {"F64", 8, std::nullopt},  {"I16", 2, std::nullopt},
    {"U16", 2, std::nullopt},       {"U32", 4, std::nullopt},  {"U64", 8, std::nullopt},
    {"I8", 1, std::nullopt},        {"BOOL", 1, std::nullopt}, {"F8_E5M2", 1, std::nullopt},
    {"F8_E8M0", 1, std::nullopt},
};

struct FileCloser {
  int fd;
  ~FileCloser() { close(fd); }
};

// What is wrong with a file as it lies there has one remedy.
template <typename... A>
Status Damaged(fmt::format_string<A...> f, A&&... a) {
  return Invalid("{} (fetch the file again)", fmt::format(f, std::forward<A>(a)...));
}

std::string Show(std::string_view s) {
  std::string out(s.substr(0, 120));
  for (char& c : out) {
    if (uint8_t(c) < 0x20) c = '?';
  }
  return out;
}

// One entry of the header: {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}, each exactly once.
Status ParseEntry(const simdjson::dom::element& value, const std::string& where, const std::byte* data,
                  uint64_t data_bytes, StoredTensor& t, uint64_t& begin) {
  simdjson::dom::object object;
  if (value.get(object) != simdjson::SUCCESS) return Damaged("{}: its header entry is not an object", where);
  const StoredType* type = nullptr;
  std::optional<std::pair<uint64_t, uint64_t>> offsets;
  bool has_shape = false;
  for (const auto& [key, field] : object) {
    if (key == "dtype") {
      std::string_view name;
      if (type != nullptr || field.get(name) != simdjson::SUCCESS) {
        return Damaged("{}: dtype is repeated or not a string", where);
      }
      for (const StoredType& s : kStoredTypes) {
        if (s.name == name) type = &s;
      }
      if (type == nullptr) {
        return Invalid("{}: dtype \"{}\" is not known; use a checkpoint of F32, BF16, F16 or block F8_E4M3",
                       where, Show(name));
      }
    } else if (key == "shape") {
      simdjson::dom::array array;
      if (has_shape || field.get(array) != simdjson::SUCCESS)
        return Damaged("{}: shape is repeated or not a list", where);
      has_shape = true;
      for (const auto& d : array) {
        uint64_t n = 0;
        if (d.get(n) != simdjson::SUCCESS || n > (uint64_t(1) << 48)) {
          return Damaged("{}: shape has an entry that is not a whole number from 0 to 2^48", where);
        }
        t.shape.push_back(int64_t(n));
      }
      if (t.shape.size() > 16)
        return Damaged("{}: shape has {} dimensions; at most 16", where, t.shape.size());
    } else if (key == "data_offsets") {
      simdjson::dom::array array;
      uint64_t b = 0, e = 0;
      if (offsets || field.get(array) != simdjson::SUCCESS || array.size() != 2 ||
          array.at(0).get(b) != simdjson::SUCCESS || array.at(1).get(e) != simdjson::SUCCESS) {
        return Damaged("{}: data_offsets must be one list of two whole numbers", where);
      }
      offsets.emplace(b, e);
    } else {
      return Damaged("{}: header field \"{}\" is not known", where, Show(key));
    }
  }
  if (type == nullptr || !has_shape || !offsets)
    return Damaged("{}: dtype, shape or data_offsets is missing", where);
  const auto [b, e] = *offsets;
  if (b > e || e > data_bytes) {
    return Damaged(
        "{}: data_offsets [{}, {}] do not lie in the {} data bytes; the file is cut short or damaged", where,
        b, e, data_bytes);
  }
  // Bytes that the shape needs, without overflow: every step is bounded by the file's size.
  uint64_t wanted = uint64_t(type->bytes);
  for (int64_t d : t.shape) {
    if (d == 0) {
      wanted = 0;
      break;
    }
    if (wanted > (uint64_t(1) << 60) / uint64_t(d)) {
      return Damaged("{}: shape {} is larger than any file", where, ShapeString(t.shape));
    }
    wanted *= uint64_t(d);
  }
  if (wanted != e - b) {
    return Damaged("{}: shape {} of {} needs {} bytes, but data_offsets [{}, {}] hold {}", where,
                   ShapeString(t.shape), type->name, wanted, b, e, e - b);
  }
  t.dtype_name = type->name;
  t.dtype = type->dtype;
  t.data = data + b;
  t.bytes = int64_t(e - b);
  begin = b;
  return OkStatus();
}

}  // namespace

std::string ShapeString(const std::vector<int64_t>& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile());
  ASSIGN_OR_RETURN(const int fd, OpenRegularFile(path));
  const FileCloser closer{fd};
  struct stat st {};
  if (fstat(fd, &st) != 0)
    return Unavailable("{}: cannot be read: {}; check the disk", path, std::strerror(errno));
  if (st.st_size < 8) {
    return Damaged("{}: {} bytes are too few for a safetensors file; it is cut short", path, st.st_size);
  }
  void* map = mmap(nullptr, size_t(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  if (map == MAP_FAILED) {
    return Unavailable("{}: cannot be mapped: {}; free address space (ulimit -v) or check the file system",
                       path, std::strerror(errno));
  }
  file->map_ = static_cast<std::byte*>(map);
  file->map_bytes_ = size_t(st.st_size);
  RETURN_IF_ERROR(file->Parse(path));
  return file;
}

Status SafetensorsFile::Parse(const std::string& path) {
  if (IsLfsPointer(std::string_view(reinterpret_cast<const char*>(map_), std::min<size_t>(map_bytes_, 64))))
    return LfsPointerError(path);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, map_, 8);
  if (header_bytes > map_bytes_ - 8) {
    return Damaged(
        "{}: the header is said to have {} bytes, but only {} follow; the file is cut short or not "
        "safetensors",
        path, header_bytes, map_bytes_ - 8);
  }
  const char* text = reinterpret_cast<const char*>(map_) + 8;
  simdjson::dom::parser parser;
  simdjson::dom::element root;
  if (const auto error = parser.parse(text, header_bytes).get(root)) {
    return Damaged("{}: the header is not valid JSON: {}", path, simdjson::error_message(error));
  }
  simdjson::dom::object object;
  if (root.get(object) != simdjson::SUCCESS) return Damaged("{}: the header is not a JSON object", path);

  const std::byte* data = map_ + 8 + header_bytes;
  const uint64_t data_bytes = map_bytes_ - 8 - header_bytes;
  absl::flat_hash_set<std::string> names;
  std::vector<std::pair<uint64_t, size_t>> order;  // begin, index
  bool has_metadata = false;
  for (const auto& [key, value] : object) {
    if (key == "__metadata__") {
      simdjson::dom::object entries;
      if (has_metadata || value.get(entries) != simdjson::SUCCESS) {
        return Damaged("{}: __metadata__ is repeated or not an object", path);
      }
      has_metadata = true;
      for (const auto& [k, v] : entries) {
        std::string_view s;
        if (v.get(s) != simdjson::SUCCESS)
          return Damaged("{}: __metadata__ \"{}\" is not a string", path, Show(k));
        metadata_.emplace_back(k, s);
      }
      continue;
    }
    StoredTensor t;
    t.name = std::string(key);
    t.file = path;
    const std::string where = fmt::format("{}: tensor \"{}\"", path, Show(key));
    if (!names.insert(t.name).second) return Damaged("{}: appears twice in the header", where);
    uint64_t begin = 0;
    RETURN_IF_ERROR(ParseEntry(value, where, data, data_bytes, t, begin));
    order.emplace_back(begin, tensors_.size());
    tensors_.push_back(std::move(t));
  }
  std::sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
    // An empty tensor shares its begin with a neighbour and goes first.
    return std::pair(a.first, tensors_[a.second].bytes) < std::pair(b.first, tensors_[b.second].bytes);
  });
  uint64_t next = 0;
  for (const auto& [begin, i] : order) {
    if (begin != next) {
      return Damaged(
          "{}: tensor \"{}\" begins at data byte {}, expected {}: the tensors overlap or leave a gap", path,
          Show(tensors_[i].name), begin, next);
    }
    next = begin + uint64_t(tensors_[i].bytes);
  }
  if (next != data_bytes) {
    return Damaged("{}: {} bytes follow the last tensor{}{}; they belong to no tensor", path,
                   data_bytes - next, order.empty() ? "" : " ",
                   order.empty() ? "" : "\"" + Show(tensors_[order.back().second].name) + "\"");
  }
  return OkStatus();
}

const StoredTensor* SafetensorsFile::Find(std::string_view name) const {
  for (const StoredTensor& t : tensors_) {
    if (t.name == name) return &t;
  }
  return nullptr;
}

void SafetensorsFile::DropResidentPages() const { madvise(map_, map_bytes_, MADV_DONTNEED); }

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

}  // namespace sluice
