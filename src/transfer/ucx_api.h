// The functions of libucp that the ucx transport calls. The library is found and opened when it is first
// wanted and never closed: a server that does not use it neither needs it nor runs its start code. Only
// ucx_*.cc include this. The headers of any release from 1.13 on do: what later ones added to the structs is
// named by field masks.
#pragma once

#include <sys/socket.h>
#include <ucp/api/ucp.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace sluice::transfer {

struct UcxApi {
  unsigned major = 0, minor = 0, release = 0;
  std::string path;  // of the library
#define SLUICE_UCX_FUNCTIONS(F)     \
  F(ucp_config_read)                \
  F(ucp_config_release)             \
  F(ucp_init_version)               \
  F(ucp_cleanup)                    \
  F(ucp_worker_create)              \
  F(ucp_worker_destroy)             \
  F(ucp_worker_query)               \
  F(ucp_worker_get_efd)             \
  F(ucp_worker_arm)                 \
  F(ucp_worker_progress)            \
  F(ucp_worker_set_am_recv_handler) \
  F(ucp_listener_create)            \
  F(ucp_listener_query)             \
  F(ucp_listener_reject)            \
  F(ucp_listener_destroy)           \
  F(ucp_ep_create)                  \
  F(ucp_ep_close_nbx)               \
  F(ucp_am_send_nbx)                \
  F(ucp_request_check_status)       \
  F(ucp_request_free)               \
  F(ucs_status_string)
#define SLUICE_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  SLUICE_UCX_FUNCTIONS(SLUICE_UCX_MEMBER)
#undef SLUICE_UCX_MEMBER
};

// `library`: a file, or "" for that of the libucx package of the Python environment, else the loader's
// libucp.so.0. Unavailable names what was required and found, and the remedy. The first call
// decides, and changes the environment (UCX reads its settings from there): make it before other threads run.
// Any thread afterwards.
StatusOr<const UcxApi*> LoadUcx(const std::string& library);

// One per data path and process. Thread: the owner's.
class UcxContext {
 public:
  // Unavailable: what is required (a transport with active messages and wake-up; room for the header of a
  // message), and what was found.
  static StatusOr<std::shared_ptr<UcxContext>> Make();
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;
  const UcxApi& api() const { return *api_; }
  ucp_context_h handle() const { return context_; }
  size_t header_bytes_max() const { return header_bytes_max_; }

 private:
  explicit UcxContext(const UcxApi* api) : api_(api) {}
  const UcxApi* const api_;
  ucp_context_h context_ = nullptr;
  size_t header_bytes_max_ = 0;
};

// One connection to one peer: a worker of its own, so that its end cuts everything the peer could still
// write, on TCP and on RDMA alike. Not movable: UCX holds its address.
class UcxLink {
 public:
  static StatusOr<std::unique_ptr<UcxLink>> Make(std::shared_ptr<UcxContext> context);
  ~UcxLink() { Close(); }
  UcxLink(const UcxLink&) = delete;
  UcxLink& operator=(const UcxLink&) = delete;

  // Ends what is under way (its callbacks come from within, with an error) and fences: no byte of the peer
  // lands afterwards. Nothing else may be called after it.
  void Close();
  // The same for the peer, but the listener stays and turns everybody away: UCX's own thread may be reading
  // somebody's request to connect, and in 1.22.0 ends the process when the listener is gone before it is done
  // (wireup_cm.c:1130). Progress may be called on; Close some time later.
  void Retire();
  // Waits at that address, whatever its port, for one peer, and gives the port.
  StatusOr<uint16_t> Listen(sockaddr_storage at);
  Status Connect(sockaddr_storage to, uint16_t port);
  bool connected() const { return endpoint_ != nullptr; }
  void OnMessage(unsigned id, ucp_am_recv_callback_t callback, void* arg);
  bool Progress() { return api_.ucp_worker_progress(worker_) != 0; }
  bool Arm() { return api_.ucp_worker_arm(worker_) == UCS_OK; }  // false: Progress has something to do
  int descriptor() const { return descriptor_; }
  // null: done at once. Error: not sent; otherwise `callback` gets the request and frees it. Header, pieces
  // and what they point to stay as they are until then.
  StatusOr<void*> Send(unsigned id, std::span<const std::byte> header, std::span<const ucp_dt_iov_t> pieces,
                       ucp_send_nbx_callback_t callback, void* user);
  void Free(void* request) { api_.ucp_request_free(request); }
  Status Error(const char* what, ucs_status_t status) const;

  void Fail(Status why) {
    if (failed_.ok()) failed_ = std::move(why);
  }
  const Status& failed() const { return failed_; }

 private:
  explicit UcxLink(std::shared_ptr<UcxContext> context)
      : context_(std::move(context)), api_(context_->api()) {}
  const std::shared_ptr<UcxContext> context_;
  const UcxApi& api_;
  Status MakeEndpoint(ucp_ep_params_t params);
  void CloseEndpoint();
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  int descriptor_ = -1;
  bool retired_ = false;
  Status failed_;
};

}  // namespace sluice::transfer
