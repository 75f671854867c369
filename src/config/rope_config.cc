#include "config/rope_config.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace sluice {
namespace {

constexpr double kDefaultTheta = 10000.0;

struct Settings {
  std::string type = "default";
  double theta = kDefaultTheta;
  double factor = 1, beta_fast = 32, beta_slow = 1, mscale = 1, mscale_all_dim = 0;
  double attention_factor = 0;  // 0: from mscale
  int64_t original_max_position = 0;
  bool operator==(const Settings&) const = default;
};

StatusOr<Settings> ReadObject(const JsonFields& config, const Json& object, const std::string& name) {
  if (!object.is_object()) return config.WrongType(name, object, "an object or null");
  const JsonFields f(object, name + ".");
  Settings s;
  ASSIGN_OR_RETURN(std::string rope_type, f.String("rope_type", ""));
  ASSIGN_OR_RETURN(std::string type, f.String("type", ""));
  if (!rope_type.empty() && !type.empty() && rope_type != type) {
    return Invalid("{0}: \"rope_type\" is \"{1}\" but \"type\" is \"{2}\"; keep one of them", name, rope_type,
                   type);
  }
  if (rope_type.empty()) rope_type = type;
  if (rope_type.empty()) rope_type = "default";
  if (rope_type == "deepseek_yarn") rope_type = "yarn";
  if (rope_type != "default" && rope_type != "yarn") {
    return Invalid("{}.rope_type: \"{}\" is not supported; supported are \"default\" and \"yarn\"", name,
                   rope_type);
  }
  s.type = rope_type;
  ASSIGN_OR_RETURN(double top_theta, config.Real("rope_theta", kDefaultTheta));
  ASSIGN_OR_RETURN(s.theta, f.Real("rope_theta", top_theta));
  if (config.Has("rope_theta") && s.theta != top_theta) {
    return Invalid("rope_theta: {} differs from {}.rope_theta {}; keep one of them", top_theta, name,
                   s.theta);
  }
  ASSIGN_OR_RETURN(double partial, f.Real("partial_rotary_factor", 1.0));
  if (partial != 1.0) {
    return Invalid(
        "{}.partial_rotary_factor: {} is not supported; the rotary part is qk_rope_head_dim as a whole (1.0)",
        name, partial);
  }
  if (s.type == "default") return s;
  ASSIGN_OR_RETURN(s.factor, f.Real("factor", std::nullopt));
  if (s.factor < 1.0) return Invalid("{}.factor: {} is not a number >= 1", name, s.factor);
  ASSIGN_OR_RETURN(s.beta_fast, f.Real("beta_fast", 32.0));
  ASSIGN_OR_RETURN(s.beta_slow, f.Real("beta_slow", 1.0));
  if (s.beta_fast <= 0 || s.beta_slow <= 0 || s.beta_fast < s.beta_slow) {
    return Invalid("{}: beta_fast {} and beta_slow {} must be positive, beta_fast the larger", name,
                   s.beta_fast, s.beta_slow);
  }
  ASSIGN_OR_RETURN(s.mscale, f.Real("mscale", 1.0));
  ASSIGN_OR_RETURN(s.mscale_all_dim, f.Real("mscale_all_dim", 0.0));
  if (s.mscale < 0 || s.mscale_all_dim < 0) {
    return Invalid("{}: mscale {} and mscale_all_dim {} must not be negative", name, s.mscale,
                   s.mscale_all_dim);
  }
  ASSIGN_OR_RETURN(s.attention_factor, f.Real("attention_factor", 0.0));
  if (s.attention_factor < 0) return Invalid("{}.attention_factor: {} is negative", name, s.attention_factor);
  ASSIGN_OR_RETURN(bool truncate, f.Bool("truncate", true));
  if (!truncate)
    return Invalid("{}.truncate: false is not supported; the correction range is rounded to whole dims",
                   name);
  std::optional<int64_t> fallback;
  if (config.Has("original_max_position_embeddings")) {
    ASSIGN_OR_RETURN(fallback, config.Int("original_max_position_embeddings", std::nullopt, 1));
  } else if (config.Has("max_position_embeddings")) {
    ASSIGN_OR_RETURN(fallback, config.Int("max_position_embeddings", std::nullopt, 1));
  }
  ASSIGN_OR_RETURN(s.original_max_position, f.Int("original_max_position_embeddings", fallback, 1));
  return s;
}

double YarnTemperature(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

// The dimension (pair index) whose wavelength makes `rotations` turns within the original context.
double CorrectionDim(double rotations, int64_t dim, double theta, int64_t original_max_position) {
  return double(dim) * std::log(double(original_max_position) / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(theta));
}

}  // namespace

StatusOr<RopeConfig> ReadRopeConfig(const JsonFields& config, int64_t dim) {
  Settings s;
  const Json* parameters = config.Find("rope_parameters");
  const Json* scaling = config.Find("rope_scaling");
  // Families differ in the value that an absent key would stand for: none is made up.
  const auto has_theta = [](const Json* object) {
    return object != nullptr && object->is_object() && JsonFields(*object).Has("rope_theta");
  };
  const bool objects =
      (parameters == nullptr || parameters->is_object()) && (scaling == nullptr || scaling->is_object());
  if (objects && !config.Has("rope_theta") && !has_theta(parameters) && !has_theta(scaling))
    return config.Missing(parameters != nullptr ? "rope_parameters.rope_theta" : "rope_theta");
  if (parameters != nullptr) {
    ASSIGN_OR_RETURN(s, ReadObject(config, *parameters, "rope_parameters"));
    if (scaling != nullptr) {
      ASSIGN_OR_RETURN(Settings other, ReadObject(config, *scaling, "rope_scaling"));
      // An alias of the same object may lack theta; everything else must agree.
      const JsonFields f(*scaling);
      if (!f.Has("rope_theta") && !config.Has("rope_theta")) other.theta = s.theta;
      if (!(other == s)) {
        return Invalid(
            "rope_parameters and rope_scaling are both present and differ (types \"{}\" and \"{}\", factors "
            "{} "
            "and {}); remove one of them",
            s.type, other.type, s.factor, other.factor);
      }
    }
  } else if (scaling != nullptr) {
    ASSIGN_OR_RETURN(s, ReadObject(config, *scaling, "rope_scaling"));
  } else {
    ASSIGN_OR_RETURN(s.theta, config.Real("rope_theta", kDefaultTheta));
  }
  if (s.theta <= 1.0) return Invalid("rope_theta: {} is not a number > 1", s.theta);

  RopeConfig r;
  r.theta = s.theta;
  r.yarn = s.type == "yarn";
  r.factor = s.factor;
  r.beta_fast = s.beta_fast;
  r.beta_slow = s.beta_slow;
  r.mscale = s.mscale;
  r.mscale_all_dim = s.mscale_all_dim;
  r.original_max_position = s.original_max_position;
  const int64_t half = dim / 2;
  double low = 0, high = 0;
  if (r.yarn) {
    low = std::max(std::floor(CorrectionDim(r.beta_fast, dim, r.theta, r.original_max_position)), 0.0);
    high = std::min(std::ceil(CorrectionDim(r.beta_slow, dim, r.theta, r.original_max_position)),
                    double(dim - 1));
    if (low == high) high += 0.001;
    if (s.attention_factor > 0) {
      r.cos_sin_scale = float(s.attention_factor);
    } else if (r.mscale > 0 && r.mscale_all_dim > 0) {
      r.cos_sin_scale =
          float(YarnTemperature(r.factor, r.mscale) / YarnTemperature(r.factor, r.mscale_all_dim));
    } else {
      r.cos_sin_scale = float(YarnTemperature(r.factor, 1.0));
    }
  }
  // In float32 like the training frameworks: pos * inv_freq reaches thousands of turns, so the rounding of
  // inv_freq is part of the model.
  for (int64_t i = 0; i < half; ++i) {
    const float freq = std::pow(float(r.theta), float(2 * i) / float(dim));
    if (!r.yarn) {
      r.inv_freq.push_back(1.0f / freq);
      continue;
    }
    const float extrapolated = 1.0f / freq, interpolated = 1.0f / (float(r.factor) * freq);
    const float ramp = std::clamp((float(i) - float(low)) / float(high - low), 0.0f, 1.0f);
    const float keep = 1.0f - ramp;
    r.inv_freq.push_back(interpolated * (1.0f - keep) + extrapolated * keep);
  }
  return r;
}

float AttentionScale(const RopeConfig& rope, int64_t head_dim) {
  double scale = 1.0 / std::sqrt(double(head_dim));
  if (rope.yarn && rope.mscale_all_dim > 0) {
    const double m = YarnTemperature(rope.factor, rope.mscale_all_dim);
    scale *= m * m;
  }
  return float(scale);
}

}  // namespace sluice
