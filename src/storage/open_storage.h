// From what the operator writes (--hicache-storage-backend and its extra config) to a backend.
#pragma once

#include "storage/storage.h"

namespace sluice {

// backend: "file" or "redis". extra_config: "" or a JSON object; unknown keys are refused with the known ones
// named.
//   file:  directory (default_directory), capacity_gb (0 = unbounded), engine ("auto", "io_uring",
//   "threads"), threads,
//          depth, direct_io, io_timeout_s
//   redis: host, port, unix_socket, username, password, database, prefix, ttl_s, threads, io_timeout_s
StatusOr<std::unique_ptr<StorageBackend>> OpenStorage(std::string_view backend, std::string_view extra_config,
                                                      std::string_view default_directory,
                                                      StorageFormat format, const Clock* clock);

}  // namespace sluice
