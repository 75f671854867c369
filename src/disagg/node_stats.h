// What an instance's half of prefill/decode disaggregation says of itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "disagg/room_timeline.h"
#include "transfer/rooms.h"

namespace sluice::disagg {

// Counters for /metrics and /server_info; a value that any thread may hold.
struct NodeStats {
  std::string role, transport, instance_id;
  uint64_t epoch = 0;
  int64_t bytes_sent = 0, bytes_received = 0;
  int64_t bytes_before_forward_end = 0, latent_bytes = 0, index_bytes = 0, draft_bytes = 0, aux_bytes = 0;
  int64_t rooms_completed = 0, rooms_failed = 0, rooms_aborted = 0;
  int64_t rooms_per_layer = 0, rooms_by_flag = 0, rooms_by_fault = 0, rooms_empty = 0;
  int64_t layers_sent_at_end = 0, bytes_sent_at_end = 0, writes = 0, write_retries = 0, resumes = 0;
  int64_t aborts_sent = 0, abort_acks = 0, fences = 0, late_frames = 0;
  double abort_ack_seconds = 0;  // all of them together
  int64_t active_rooms = 0, leased_pages = 0, outstanding_writes = 0;
  // Of completed rooms that moved something, together, in seconds; never negative.
  double wait_layers_s = 0, wait_completions_s = 0, transfer_s = 0;
  int64_t digests_checked = 0;
  std::vector<std::string> peers;
  std::string last_error;
  std::vector<transfer::RoomRecord> rooms, ended;  // some of the active ones; the last ones that ended
  RoomTimelines timelines;
};

}  // namespace sluice::disagg
