#include "storage/open_storage.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "nlohmann/json.hpp"
#include "storage/file_storage.h"
#include "storage/redis_storage.h"

namespace sluice {
namespace {

using Json = nlohmann::json;
using Setter = std::function<bool(const Json&)>;  // false: wrong type or range

Setter Text(std::string* to) {
  return [to](const Json& j) { return j.is_string() && (*to = j.get<std::string>(), true); };
}
Setter Flag(bool* to) {
  return [to](const Json& j) { return j.is_boolean() && (*to = j.get<bool>(), true); };
}
template <typename T>
Setter Whole(T* to, int64_t least, int64_t most) {
  return [=](const Json& j) {
    if (!j.is_number_integer() || j.get<int64_t>() < least || j.get<int64_t>() > most) return false;
    *to = T(j.get<int64_t>());
    return true;
  };
}
Setter Scaled(int64_t* to, double factor) {
  return [=](const Json& j) {
    if (!j.is_number() || j.get<double>() < 0 || j.get<double>() > 1e6) return false;
    const double scaled = j.get<double>() * factor;
    *to = scaled > 0 ? std::max<int64_t>(1, std::llround(scaled)) : 0;  // 0 often means "no limit"
    return true;
  };
}

Status Apply(std::string_view backend, std::string_view extra, const std::map<std::string, Setter>& known) {
  if (extra.empty()) return OkStatus();
  const Json config = Json::parse(extra, nullptr, false);
  if (!config.is_object())
    return Invalid("--hicache-storage-backend-extra-config: not a JSON object: {}; write {{\"key\": value}}",
                   extra);
  for (const auto& [key, value] : config.items()) {
    const auto it = known.find(key);
    if (it == known.end()) {
      std::string names;
      for (const auto& [name, setter] : known) names += (names.empty() ? "" : ", ") + name;
      return Invalid("--hicache-storage-backend-extra-config: {} knows no {}; it knows {}", backend, key,
                     names);
    }
    if (!it->second(value))
      return Invalid("--hicache-storage-backend-extra-config: {} cannot be {}; its type or range is wrong",
                     key, value.dump());
  }
  return OkStatus();
}

}  // namespace

StatusOr<std::unique_ptr<StorageBackend>> OpenStorage(std::string_view backend, std::string_view extra_config,
                                                      std::string_view default_directory,
                                                      StorageFormat format, const Clock* clock) {
  if (backend == "file") {
    FileStorageOptions o;
    o.directory = default_directory;
    o.clock = clock;
    std::string engine = "auto";
    const Status s = Apply(backend, extra_config,
                           {{"directory", Text(&o.directory)},
                            {"capacity_gb", Scaled(&o.capacity_bytes, 1e9)},
                            {"engine", Text(&engine)},
                            {"threads", Whole(&o.threads, 1, 64)},
                            {"depth", Whole(&o.depth, 1, 256)},
                            {"direct_io", Flag(&o.direct_io)},
                            {"io_timeout_s", Scaled(&o.io_timeout, 1e9)}});
    if (!s.ok()) return s;
    if (engine == "auto")
      o.engine = FileEngine::kAuto;
    else if (engine == "io_uring")
      o.engine = FileEngine::kUring;
    else if (engine == "threads")
      o.engine = FileEngine::kThreads;
    else
      return Invalid("--hicache-storage-backend-extra-config: engine {} is none of auto, io_uring, threads",
                     engine);
    if (o.capacity_bytes > 0 && !format.piece_bytes.empty()) {
      const int64_t least = FileTransfer::FileBytes(ObjectFormat(format, kFileAlign));
      if (o.capacity_bytes < least)
        return Invalid(
            "--hicache-storage-backend-extra-config: capacity_gb {:.9f} holds no page, which takes {} bytes; "
            "use at "
            "least {:.9f}, or 0 for no limit",
            double(o.capacity_bytes) / 1e9, least, double(least) / 1e9);
    }
    auto opened = FileStorage::Open(std::move(format), o);
    if (!opened.ok()) return opened.status();
    return std::unique_ptr<StorageBackend>(*std::move(opened));
  }
  if (backend == "redis") {
    RedisStorageOptions o;
    o.clock = clock;
    const Status s = Apply(backend, extra_config,
                           {{"host", Text(&o.host)},
                            {"port", Whole(&o.port, 1, 65535)},
                            {"unix_socket", Text(&o.unix_socket)},
                            {"username", Text(&o.username)},
                            {"password", Text(&o.password)},
                            {"database", Whole(&o.database, 0, 1 << 20)},
                            {"prefix", Text(&o.prefix)},
                            {"ttl_s", Whole(&o.ttl_s, 0, int64_t{1} << 40)},
                            {"threads", Whole(&o.threads, 1, 64)},
                            {"io_timeout_s", Scaled(&o.io_timeout, 1e9)}});
    if (!s.ok()) return s;
    auto opened = RedisStorage::Open(std::move(format), o);
    if (!opened.ok()) return opened.status();
    return std::unique_ptr<StorageBackend>(*std::move(opened));
  }
  return Invalid("--hicache-storage-backend: {} is none of file, redis", backend);
}

}  // namespace sluice
