#include "base/plant.h"

namespace sluice {
#ifdef SLUICE_PLANTS
Plant planted = Plant::kNone;
#endif
}  // namespace sluice
