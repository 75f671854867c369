// Logging: spdlog behind one include. Never called per request, step, layer, page or transfer at the default
// level.
#pragma once

#include "spdlog/spdlog.h"
