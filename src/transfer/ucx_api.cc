#include "transfer/ucx_api.h"

#include <dlfcn.h>
#include <glob.h>
#include <netinet/in.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <sstream>

#include "base/log.h"

namespace sluice::transfer {
namespace {

constexpr const char* kLibrary = "libucp.so.0";
// Opened before it, from the same folder: the loader takes a library that is open for its name, and so those
// of another release stay out.
constexpr const char* kItsLibraries[] = {"libucs.so.0", "libuct.so.0"};
// The oldest release that was tried and lived: ucx_transport.h.
constexpr unsigned kMajor = 1, kMinor = 22;
constexpr const char* kRemedy =
    "pip install libucx-cu12 into the Python environment that the server is started from, or name a "
    "libucp.so.0 by "
    "--disaggregation-ucx-library, or use --disaggregation-transfer-backend tcp";
constexpr size_t kHeaderBytesMin = 1024;
constexpr auto kCloseTime = std::chrono::seconds(1);

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The library of the Python package libucx, in the environment that is active, else that of the first python3
// of PATH, else the user's, else the system's.
std::string FromPython() {
  std::vector<std::string> roots;
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"})
    if (const std::string active = Environment(name); !active.empty())
      roots.push_back(active + "/lib/python3*/site-packages");
  std::istringstream folders(Environment("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (access((folder + "/python3").c_str(), X_OK) != 0) continue;
    roots.push_back(folder + "/../lib/python3*/site-packages");
    break;
  }
  if (const std::string home = Environment("HOME"); !home.empty())
    roots.push_back(home + "/.local/lib/python3*/site-packages");
  for (const char* root : {"/usr/local/lib/python3*/dist-packages", "/usr/local/lib/python3*/site-packages",
                           "/usr/lib/python3/dist-packages"})
    roots.emplace_back(root);
  for (const std::string& root : roots) {
    glob_t found{};
    const bool any =
        glob((root + "/libucx/lib/" + kLibrary).c_str(), 0, nullptr, &found) == 0 && found.gl_pathc > 0;
    std::string path = any ? found.gl_pathv[found.gl_pathc - 1] : "";
    globfree(&found);
    if (any) return path;
  }
  return "";
}

StatusOr<UcxApi> Open(const std::string& library) {
  std::string path = library.empty() ? FromPython() : library;
  if (path.empty()) path = kLibrary;

  const auto unless_set = [](const char* name, const char* value) { setenv(name, value, 0); };
  // The process stays the server's: its signals, its output, its memory functions.
  unless_set("UCX_ERROR_SIGNALS", "");
  unless_set("UCX_HANDLE_ERRORS", "none");
  unless_set("UCX_LOG_FILE", "stderr");
  unless_set("UCX_LOG_LEVEL", "error");
  unless_set("UCX_WARN_UNUSED_ENV_VARS", "n");
  unless_set("UCX_MEM_MMAP_HOOK_MODE", "none");
  // Messages go and come in one piece; with the 8 KiB of TCP's default the speed is a third. The same on both
  // sides.
  unless_set("UCX_TCP_TX_SEG_SIZE", "256k");
  unless_set("UCX_TCP_RX_SEG_SIZE", "256k");
  unless_set("UCX_ZCOPY_THRESH", "inf");
  // Between processes of one host it has no way to learn of a peer's end through memory; that is what the
  // shm transport is for.
  unless_set("UCX_TLS", "^shm");

  if (const size_t slash = path.rfind('/'); slash != std::string::npos)
    for (const char* its : kItsLibraries)  // what is not there the loader looks for elsewhere
      (void)dlopen((path.substr(0, slash + 1) + its).c_str(), RTLD_NOW | RTLD_LOCAL);
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return Unavailable("transport ucx: required UCX {}.{} or newer, found none ({}); {}", kMajor, kMinor,
                       why == nullptr ? path : why, kRemedy);
  }
  UcxApi api;
  Dl_info info{};
  api.path = path;
  if (void* symbol = dlsym(handle, "ucp_get_version")) {
    if (dladdr(symbol, &info) != 0 && info.dli_fname != nullptr) api.path = info.dli_fname;
    reinterpret_cast<decltype(&::ucp_get_version)>(symbol)(&api.major, &api.minor, &api.release);
  }
  if (api.major != kMajor || api.minor < kMinor)
    return Unavailable(
        "transport ucx: required UCX {}.{} or a newer {}.x, found {}.{}.{} at {} (releases before end the "
        "whole "
        "process when a peer goes in the middle of a transfer); {}",
        kMajor, kMinor, kMajor, api.major, api.minor, api.release, api.path, kRemedy);
#define SLUICE_UCX_FIND(name)                                                                         \
  api.name = reinterpret_cast<decltype(api.name)>(dlsym(handle, #name));                              \
  if (api.name == nullptr)                                                                            \
    return Unavailable("transport ucx: required UCX {}.{} or newer, found {} without {}; {}", kMajor, \
                       kMinor, api.path, #name, kRemedy);
  SLUICE_UCX_FUNCTIONS(SLUICE_UCX_FIND)
#undef SLUICE_UCX_FIND
  spdlog::info("transport ucx: UCX {}.{}.{} at {}", api.major, api.minor, api.release, api.path);
  return api;
}

Status Failed(const UcxApi& api, const char* what, ucs_status_t status) {
  return Unavailable("transport ucx: {}: {}", what, api.ucs_status_string(status));
}

// Where the port of an address is.
uint16_t& PortOf(sockaddr_storage& address) {
  return address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                       : reinterpret_cast<sockaddr_in&>(address).sin_port;
}
ucs_sock_addr_t AsUcx(const sockaddr_storage& address) {
  return {reinterpret_cast<const sockaddr*>(&address),
          socklen_t(address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in))};
}

}  // namespace

StatusOr<const UcxApi*> LoadUcx(const std::string& library) {
  static std::once_flag once;
  static StatusOr<UcxApi>* api = nullptr;
  std::call_once(once, [&] { api = new StatusOr<UcxApi>(Open(library)); });
  RETURN_IF_ERROR(api->status());
  return &**api;
}

StatusOr<std::shared_ptr<UcxContext>> UcxContext::Make() {
  ASSIGN_OR_RETURN(const UcxApi* api, LoadUcx(""));
  std::shared_ptr<UcxContext> c(new UcxContext(api));
  ucp_config_t* config = nullptr;
  if (const ucs_status_t s = api->ucp_config_read(nullptr, nullptr, &config); s != UCS_OK)
    return Failed(*api, "its settings", s);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  const ucs_status_t made =
      api->ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &c->context_);
  api->ucp_config_release(config);
  if (made != UCS_OK) {
    c->context_ = nullptr;
    return Unavailable(
        "transport ucx: required a UCX transport with active messages and wake-up, found none ({}); look at "
        "UCX_TLS and UCX_NET_DEVICES",
        api->ucs_status_string(made));
  }
  ucp_worker_params_t worker{};
  ucp_worker_h probe = nullptr;
  if (const ucs_status_t s = api->ucp_worker_create(c->context_, &worker, &probe); s != UCS_OK)
    return Failed(*api, "a worker", s);
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  const ucs_status_t asked = api->ucp_worker_query(probe, &attributes);
  api->ucp_worker_destroy(probe);
  if (asked != UCS_OK) return Failed(*api, "what it can do", asked);
  c->header_bytes_max_ = attributes.max_am_header;
  if (c->header_bytes_max_ < kHeaderBytesMin)
    return Unavailable("transport ucx: required active messages with headers of {} bytes, found {}",
                       kHeaderBytesMin, c->header_bytes_max_);
  return c;
}

UcxContext::~UcxContext() {
  if (context_ != nullptr) api_->ucp_cleanup(context_);
}

Status UcxLink::Error(const char* what, ucs_status_t status) const { return Failed(api_, what, status); }

StatusOr<std::unique_ptr<UcxLink>> UcxLink::Make(std::shared_ptr<UcxContext> context) {
  std::unique_ptr<UcxLink> link(new UcxLink(std::move(context)));
  const UcxApi& api = link->api_;
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  if (const ucs_status_t s = api.ucp_worker_create(link->context_->handle(), &params, &link->worker_);
      s != UCS_OK) {
    link->worker_ = nullptr;
    return link->Error("a worker", s);
  }
  if (const ucs_status_t s = api.ucp_worker_get_efd(link->worker_, &link->descriptor_); s != UCS_OK)
    return link->Error("its wake-up descriptor", s);
  return link;
}

void UcxLink::Close() {
  if (listener_ != nullptr) api_.ucp_listener_destroy(std::exchange(listener_, nullptr));
  CloseEndpoint();
  if (worker_ != nullptr) api_.ucp_worker_destroy(std::exchange(worker_, nullptr));
}

void UcxLink::Retire() {
  retired_ = true;
  CloseEndpoint();
}

void UcxLink::CloseEndpoint() {
  if (endpoint_ == nullptr) return;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = api_.ucp_ep_close_nbx(std::exchange(endpoint_, nullptr), &params);
  if (!UCS_PTR_IS_PTR(request)) return;
  // It waits for nobody; the limit is for a library that thinks otherwise.
  const auto until = std::chrono::steady_clock::now() + kCloseTime;
  while (api_.ucp_request_check_status(request) == UCS_INPROGRESS && std::chrono::steady_clock::now() < until)
    Progress();
  api_.ucp_request_free(request);
}

Status UcxLink::MakeEndpoint(ucp_ep_params_t params) {
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void* arg, ucp_ep_h, ucs_status_t status) {
    auto* link = static_cast<UcxLink*>(arg);
    link->Fail(link->Error("the connection broke", status));
  };
  params.err_handler.arg = this;
  if (const ucs_status_t s = api_.ucp_ep_create(worker_, &params, &endpoint_); s != UCS_OK) {
    endpoint_ = nullptr;
    return Error("cannot connect by a transport that detects the end of a peer", s);
  }
  return OkStatus();
}

StatusOr<uint16_t> UcxLink::Listen(sockaddr_storage at) {
  PortOf(at) = 0;
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = AsUcx(at);
  params.conn_handler.cb = [](ucp_conn_request_h request, void* arg) {
    auto* link = static_cast<UcxLink*>(arg);
    if (link->retired_ || link->connected()) {
      link->api_.ucp_listener_reject(link->listener_, request);
      return;
    }
    ucp_ep_params_t endpoint{};
    endpoint.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
    endpoint.conn_request = request;
    if (const Status s = link->MakeEndpoint(endpoint); !s.ok()) link->Fail(s);
  };
  params.conn_handler.arg = this;
  if (const ucs_status_t s = api_.ucp_listener_create(worker_, &params, &listener_); s != UCS_OK) {
    listener_ = nullptr;
    return Error("cannot listen", s);
  }
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  if (const ucs_status_t s = api_.ucp_listener_query(listener_, &attributes); s != UCS_OK)
    return Error("its port", s);
  return ntohs(PortOf(attributes.sockaddr));
}

Status UcxLink::Connect(sockaddr_storage to, uint16_t port) {
  if (endpoint_ != nullptr) return Invalid("transport ucx: a second address on one connection");
  PortOf(to) = htons(port);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = AsUcx(to);
  return MakeEndpoint(params);
}

void UcxLink::OnMessage(unsigned id, ucp_am_recv_callback_t callback, void* arg) {
  ucp_am_handler_param_t params{};
  params.field_mask =
      UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  params.id = id;
  params.cb = callback;
  params.arg = arg;
  if (const ucs_status_t s = api_.ucp_worker_set_am_recv_handler(worker_, &params); s != UCS_OK)
    Fail(Error("a message handler", s));
}

StatusOr<void*> UcxLink::Send(unsigned id, std::span<const std::byte> header,
                              std::span<const ucp_dt_iov_t> pieces, ucp_send_nbx_callback_t callback,
                              void* user) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_AM_SEND_FLAG_EAGER;
  params.cb.send = callback;
  params.user_data = user;
  const void* data = pieces.empty() ? nullptr : pieces[0].buffer;
  size_t count = pieces.empty() ? 0 : pieces[0].length;
  if (pieces.size() > 1) {
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
    params.datatype = ucp_dt_make_iov();
    data = pieces.data();
    count = pieces.size();
  }
  void* request = api_.ucp_am_send_nbx(endpoint_, id, header.data(), header.size(), data, count, &params);
  if (UCS_PTR_IS_ERR(request)) return Error("cannot send", UCS_PTR_STATUS(request));
  return request;
}

}  // namespace sluice::transfer
