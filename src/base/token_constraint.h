// What a constrained answer asks of sampling, without saying how: which tokens may come next.
//
//   serve makes a TokenConstraint > Request > scheduler (passes it on, never looks inside) > SlotInit >
//   sampler: one ConstraintState a slot
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace sluice {

// One sequence's place in its constraint. Executor thread only; work may go on on other threads between the
// calls.
class ConstraintState {
 public:
  virtual ~ConstraintState() = default;
  // The sequence continued with this token. tokens_left: that may still come. Begins the work on the next
  // mask.
  virtual void Accept(int32_t token, int32_t tokens_left) = 0;
  // Bit t: token t may come next. Waits for the mask when it is not there yet. Valid until the next call.
  // Empty: the constraint has failed.
  virtual std::span<const uint64_t> Mask(int32_t tokens_left) = 0;
  // Appends the tokens that must come next whatever the logits are, in order, at most `max`: masks would
  // allow each alone. Does not wait for a mask.
  virtual void Forced(int32_t /*max*/, std::vector<int32_t>* /*out*/) {}
};

// Immutable and shared: all choices of a request, and requests with equal constraints.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // output: tokens that the sequence has already (after a retraction, or from another server).
  virtual std::unique_ptr<ConstraintState> Start(std::span<const int32_t> output,
                                                 int32_t tokens_left) const = 0;
};

}  // namespace sluice
