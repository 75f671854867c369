#include "base/file_text.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace sluice {
namespace {

std::string_view KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

}  // namespace

StatusOr<int> OpenRegularFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) {
      struct stat link {};
      if (lstat(path.c_str(), &link) == 0 && S_ISLNK(link.st_mode))
        return NotFound("{}: is a link to a file that does not exist; fetch that file or correct the link",
                        path);
      return NotFound("{}: does not exist; check the path, or fetch the file", path);
    }
    if (error == EACCES || error == EPERM)
      return Unavailable("{}: cannot be opened: {}; make it readable for this user", path,
                         std::strerror(error));
    return Unavailable("{}: cannot be opened: {}; check the path and the file system", path,
                       std::strerror(error));
  }
  struct stat st {};
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    close(fd);
    return Invalid("{}: is {}, not a regular file; put the file itself there", path, KindOf(st.st_mode));
  }
  return fd;
}

StatusOr<std::string> ReadFileText(const std::string& path) {
  ASSIGN_OR_RETURN(const int fd, OpenRegularFile(path));
  std::string text;
  char buffer[1 << 16];
  ssize_t n = 0;
  while ((n = read(fd, buffer, sizeof(buffer))) != 0) {
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;
    text.append(buffer, size_t(n));
    if (int64_t(text.size()) > kTextFileMax) break;
  }
  const int error = errno;
  close(fd);
  if (n < 0)
    return Unavailable("{}: cannot be read: {}; check the disk, or fetch the file again", path,
                       std::strerror(error));
  if (int64_t(text.size()) > kTextFileMax)
    return Invalid("{}: is larger than {} bytes, too large for such a file; check the path", path,
                   kTextFileMax);
  if (IsLfsPointer(text)) return LfsPointerError(path);
  return text;
}

bool IsLfsPointer(std::string_view head) { return head.starts_with("version https://git-lfs.github.com/"); }

Status LfsPointerError(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  return Invalid("{}: is a Git LFS pointer, not the file itself; run `git lfs pull` in {}", path,
                 folder.empty() ? "its folder" : folder.string());
}

std::string_view JsonComplaint(std::string_view what) {
  if (!what.starts_with("[json.exception.")) return what;
  const size_t end = what.find("] ");
  return end == std::string_view::npos ? what : what.substr(end + 2);
}

}  // namespace sluice
