// What the parts of the router share and nobody else sees: its workers and the answers of its own.
#pragma once

#include <string>

#include "router/router.h"

namespace sluice::router {

struct Router::Worker {
  WorkerSpec spec;
  HttpUrl url;
  int index = 0;
  // Under Router::mutex_.
  int64_t load = 0, dispatched = 0;
  int failures = 0;
  bool healthy = false;
  std::string why = "not asked yet";
};

const char* NameOf(WorkerSpec::Role role);

// An OpenAI error object.
std::string ErrorBody(const std::string& message, const char* type, const char* code);
HttpResponse Refusal(int status, const std::string& message, const char* type = "service_unavailable",
                     const char* code = "unavailable");

}  // namespace sluice::router
