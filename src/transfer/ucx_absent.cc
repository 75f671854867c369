#include "transfer/ucx_transport.h"

namespace sluice::transfer {

Status UcxSupport(const std::string&) {
  return Unavailable(
      "transport ucx: required UCX 1.22 or newer, found a build without it; install libucx-dev and build "
      "again, or use --disaggregation-transfer-backend tcp");
}
StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const DevicePool&, PeerNet*, const TransportOptions&) {
  return UcxSupport();
}
StatusOr<std::unique_ptr<UcxReceiver>> UcxReceiver::Make(const DevicePool&, PeerNet*, PeerEvents*) {
  return UcxSupport();
}

}  // namespace sluice::transfer
