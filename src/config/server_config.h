// Every flag of the server as one value. Filled from the one flag table (flags.h): command line > environment
// alias >
// --config file > default.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "config/model_config.h"

namespace sluice {

struct ServerConfig {
  // model
  std::string model_path;            // "": the bundled model
  std::string tokenizer_path;        // "": model_path
  std::string served_model_name;     // "": last part of the model path
  std::string load_format = "auto";  // auto, safetensors, dummy
  int64_t context_length = 0;        // 0: the model's
  ModelOverrides overrides;
  std::string dtype = "auto";           // auto (bf16), bfloat16, float32
  std::string kv_cache_dtype = "auto";  // auto (= dtype), bf16, fp8_e4m3, float32
  std::string index_cache_dtype = "auto";
  int64_t random_seed = 0;
  std::string device = "cpu";
  int64_t cuda_graph_max_bs = 128;  // rows of the largest step that is recorded and replayed; 0: none
  bool disable_cuda_graph = false;
  bool deterministic_inference = false;  // CUDA: no kernel chooses its work split by the batch
  std::string dsa_prefill_backend = "auto", dsa_decode_backend = "auto";  // both or none have a name
  std::string fp8_gemm_backend = "auto";  // CUDA: auto, cublaslt; any other name: the own kernel
  double watchdog_timeout_s = 0;          // of one step; 0: by the device
  bool debug_device = false;              // CUDA: steps that allocate or wait too often fail
  std::string cpu_isa = "auto";           // auto, avx2, avx512, avx512_bf16
  int64_t threads = 0;                    // compute threads in all; 0: cores of the cgroup
  // http
  std::string host = "127.0.0.1";
  int64_t port = 30000;
  std::string api_key, admin_api_key;
  std::string log_level = "info";
  bool enable_sglang_metrics = false;
  std::string sampling_defaults = "model";  // model, openai
  bool disable_page = false;
  std::string tool_call_parser = "auto", reasoning_parser = "auto";
  int64_t max_body_bytes = 16 << 20;
  int64_t max_connections = 8192;
  double shutdown_timeout_s = 30;
  double request_timeout_s = 0;  // of a request that names none; 0: none
  std::string cors_origins;      // "", "*" or a list of origins
  // memory and scheduling
  double mem_fraction_static = 0.8;
  int64_t max_running_requests = 64;
  int64_t max_queued_requests = 1024;
  int64_t max_total_tokens = 0;         // 0: from memory
  int64_t chunked_prefill_size = 2048;  // -1: off
  int64_t max_prefill_tokens = 16384;
  int64_t page_size = 64;
  std::string schedule_policy = "fcfs";  // fcfs, lpm
  bool enable_priority_scheduling = false;
  std::string radix_eviction_policy = "lru";
  bool disable_radix_cache = false;
  double schedule_conservativeness = 1.0;
  bool disable_jump_ahead = false;
  int64_t step_depth = 1;  // steps planned ahead: 0 or 1
  int64_t decode_log_interval = 40;
  // DSA
  bool nsa_dequant_only_topk = true;
  bool nsa_dequant_verify = false;
  // host and storage tiers
  bool enable_hierarchical_cache = false;
  double hicache_ratio = 2.0;
  double hicache_size_gb = 0;  // per rank; overrides the ratio
  std::string hicache_write_policy = "write_through";
  std::string hicache_io_backend = "direct";
  std::string hicache_mem_layout = "layer_first";
  std::string hicache_storage_backend;  // "", file, redis
  std::string hicache_storage_prefetch_policy = "best_effort";
  std::string hicache_storage_extra_config;
  bool debug_kv = false;
  double verify_cache = 0;
  // parallel
  int64_t tp_size = 1, attn_cp_size = 1, ep_size = 1;
  std::string cp_kv_exchange = "direct";
  int64_t cp_gather_buffer_mib = 64;
  bool enable_two_batch_overlap = false;
  // disaggregation, speculation
  std::string disaggregation_mode = "null";
  std::string disaggregation_transfer_backend = "auto";
  std::string disaggregation_ucx_library;  // "": found
  int64_t disaggregation_bootstrap_port = 8998;
  double disaggregation_bootstrap_timeout_s = 30, disaggregation_waiting_timeout_s = 30;
  double disaggregation_heartbeat_interval_s = 2;
  int64_t disaggregation_heartbeat_max_failure = 2;
  bool disaggregation_per_layer_transfer = true;
  int64_t disaggregation_layer_group = 8;
  int64_t num_reserved_decode_tokens = 512;
  double disaggregation_rate_limit_mb = 0;  // MB/s of outgoing pages; 0: none
  bool disaggregation_self_check = false;
  bool allow_mixed_numerics = false;
  std::string speculative_algorithm;
  int64_t speculative_num_steps = 0, speculative_num_draft_tokens = 0, speculative_eagle_topk = 1;
  std::string speculative_adaptive = "on";  // on, off
  // Tokens drafted for a sequence and step at most; 0: no speculation.
  int32_t DraftTokens() const;

  std::vector<std::string>
      notices;  // one line each, logged at start: accepted without effect, environment aliases in force
  // Every value under its flag's name with underscores, for /server_info; keys of clients are masked.
  std::string ResolvedJson() const;
};

// Parses argv (without the command word). Errors: unknown flag, bad value, illegal combination; each names
// flag, value, what is legal and what to do. Reads the environment aliases of flags once, here.
StatusOr<ServerConfig> ParseServerFlags(const std::vector<std::string>& args);

}  // namespace sluice
