// Where the scheduler meets the transfer: translates rooms into sequences and back. One of the two roles,
// driven by the step loop; everything here runs on the engine thread but what the node says of itself.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "exec/model_runner.h"
#include "kv/device_pool.h"
#include "request/request.h"
#include "schedule/scheduler.h"

namespace sluice {

namespace disagg {
struct NodeOptions;
}

class PdRole : public RemoteRooms {
 public:
  virtual RemoteRole role() const = 0;
  // Before the loop runs.
  virtual void Attach(Scheduler* scheduler) = 0;
  // A request with a room, on its way to Scheduler::Enqueue: its output is watched from now on.
  virtual void Accept(Request* request) = 0;
  // Applies what has happened to rooms; true: something has.
  virtual bool Poll() = 0;
  // The process ends and a peer does not answer: rooms end without it. No request may come after.
  virtual void Abandon() = 0;
  virtual PdSnapshot Snapshot() const = 0;  // any thread
  // Prefill: follows the forward. Null otherwise.
  virtual StepObserver* observer() { return nullptr; }
  // Where the wake-up of the engine thread goes; set once before the loop runs.
  std::function<void()> wake;
};

// Listens (prefill) or gets ready to connect (decode). The pool outlives the role; decode's pool must be
// shared memory for the shm transport.
StatusOr<std::unique_ptr<PdRole>> MakePrefillRole(const disagg::NodeOptions& options, const KvLayout& layout,
                                                  const DevicePool& pool);
StatusOr<std::unique_ptr<PdRole>> MakeDecodeRole(const disagg::NodeOptions& options, const KvLayout& layout,
                                                 const DevicePool& pool);

}  // namespace sluice
