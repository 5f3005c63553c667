#include "tests/unit/reduce/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>

namespace hybridps::reduce::testing {
namespace {

using core::DType;
using core::ReduceOp;

struct Format {
  int exponent_bits, mantissa_bits, bias;
  bool ieee;           // infinities
  bool unsigned_zero;  // the fnuz kinds
  std::uint64_t nan;
};

const Format* format_of(DType dtype) {
  static const std::map<DType, Format> formats = {
      {DType::kFloat16, {5, 10, 15, true, false, 0x7e00}},    {DType::kBfloat16, {8, 7, 127, true, false, 0x7fc0}},
      {DType::kFloat8E4M3fn, {4, 3, 7, false, false, 0x7f}},  {DType::kFloat8E5M2, {5, 2, 15, true, false, 0x7f}},
      {DType::kFloat8E4M3fnuz, {4, 3, 8, false, true, 0x80}}, {DType::kFloat8E5M2fnuz, {5, 2, 16, false, true, 0x80}},
  };
  const auto found = formats.find(dtype);
  return found == formats.end() ? nullptr : &found->second;
}

double decode_narrow(const Format& f, std::uint64_t code) {
  const int width = 1 + f.exponent_bits + f.mantissa_bits;
  const std::uint64_t sign = code >> (width - 1);
  const std::uint64_t magnitude = code & ((1ull << (width - 1)) - 1);
  const int exponent = static_cast<int>(magnitude >> f.mantissa_bits);
  const auto mantissa = static_cast<double>(magnitude & ((1ull << f.mantissa_bits) - 1));
  const double one = std::ldexp(1.0, f.mantissa_bits);
  if (f.ieee && exponent == (1 << f.exponent_bits) - 1) {
    if (mantissa != 0) return std::numeric_limits<double>::quiet_NaN();
    return sign ? -INFINITY : INFINITY;
  }
  if (f.unsigned_zero && code == f.nan) return std::numeric_limits<double>::quiet_NaN();
  if (!f.ieee && !f.unsigned_zero && magnitude == f.nan) return std::numeric_limits<double>::quiet_NaN();
  const double value = exponent == 0 ? std::ldexp(mantissa, 1 - f.bias - f.mantissa_bits)
                                     : std::ldexp(one + mantissa, exponent - f.bias - f.mantissa_bits);
  return sign ? -value : value;
}

/// Values of the codes 0, 1, 2, ... up to the largest finite one, and what the next code would be worth.
const std::vector<double>& magnitudes(DType dtype, const Format& f) {
  static std::map<DType, std::vector<double>> all;
  std::vector<double>& list = all[dtype];
  if (list.empty()) {
    std::uint64_t code = 0;
    for (double v = 0; std::isfinite(v); v = decode_narrow(f, code)) {
      list.push_back(v);
      if (++code >> (f.exponent_bits + f.mantissa_bits)) break;  // fnuz: the next one has the sign bit
    }
    list.push_back(2 * list.back() - list[list.size() - 2]);
  }
  return list;
}

std::uint64_t encode_narrow(DType dtype, const Format& f, double value) {
  if (std::isnan(value)) return f.nan;
  const std::vector<double>& list = magnitudes(dtype, f);
  const double magnitude = std::fabs(value);
  const std::size_t above =
      static_cast<std::size_t>(std::lower_bound(list.begin(), list.end(), magnitude) - list.begin());
  std::size_t code = above;
  if (above == list.size()) {
    code = list.size() - 1;
  } else if (list[above] != magnitude) {
    const double up = list[above] - magnitude, down = magnitude - list[above - 1];
    if (down < up || (down == up && above % 2 == 1)) code = above - 1;
  }
  const bool overflow = code == list.size() - 1;
  if (overflow && f.unsigned_zero) return f.nan;
  if (overflow && !f.ieee) --code;  // e4m3fn saturates; an IEEE format has its infinity there
  if (f.unsigned_zero && code == 0) return 0;
  return code | (std::signbit(value) ? 1ull << (f.exponent_bits + f.mantissa_bits) : 0);
}

template <class To, class From>
To bit_copy(From from) {
  To to;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

bool is_signed_int(DType d) {
  return d == DType::kInt8 || d == DType::kInt16 || d == DType::kInt32 || d == DType::kInt64;
}

/// To fp32, or not at all when the accumulator is a double.
double rounded(double value, bool wide) { return wide ? value : static_cast<double>(static_cast<float>(value)); }

double fold_real(ReduceOp op, double acc, double x, double premul, bool wide) {
  switch (op) {
    case ReduceOp::kPremulSum: {
      volatile double product = rounded(x * premul, wide);  // volatile: or a double's product and sum may be fused
      return rounded(acc + product, wide);
    }
    case ReduceOp::kProduct: return rounded(acc * x, wide);
    case ReduceOp::kMin: return std::isnan(x) || x < acc ? x : acc;
    case ReduceOp::kMax: return std::isnan(x) || x > acc ? x : acc;
    default: return rounded(acc + x, wide);
  }
}

std::uint64_t combine_real(const std::vector<std::uint64_t>& codes, const std::vector<Input>& inputs, DType dtype,
                           ReduceOp op, Finish finish) {
  const bool wide = dtype == DType::kFloat64;
  double acc = decode(dtype, codes[0]);
  if (op == ReduceOp::kPremulSum) acc = rounded(acc * rounded(inputs[0].premul, wide), wide);
  for (std::size_t k = 1; k < codes.size(); ++k) {
    acc = fold_real(op, acc, decode(dtype, codes[k]), rounded(inputs[k].premul, wide), wide);
  }
  if (finish.kind == Finish::Scaling::kMultiply) acc = rounded(acc * rounded(finish.factor, wide), wide);
  return encode(dtype, acc);
}

std::uint64_t combine_integer(const std::vector<std::uint64_t>& codes, DType dtype, ReduceOp op, Finish finish) {
  const int unused = 64 - 8 * static_cast<int>(core::size_of(dtype));
  const bool is_signed = is_signed_int(dtype);
  // Extended to 64 bits, by its sign or by zeros.
  const auto extend = [&](std::uint64_t v) {
    v <<= unused;
    return is_signed ? static_cast<std::uint64_t>(static_cast<std::int64_t>(v) >> unused) : v >> unused;
  };
  const auto less = [&](std::uint64_t a, std::uint64_t b) {
    return is_signed ? static_cast<std::int64_t>(a) < static_cast<std::int64_t>(b) : a < b;
  };
  std::uint64_t acc = extend(codes[0]);
  for (std::size_t k = 1; k < codes.size(); ++k) {
    const std::uint64_t x = extend(codes[k]);
    switch (op) {
      case ReduceOp::kProduct: acc *= x; break;
      case ReduceOp::kMin: acc = less(x, acc) ? x : acc; break;
      case ReduceOp::kMax: acc = less(acc, x) ? x : acc; break;
      case ReduceOp::kBand: acc &= x; break;
      case ReduceOp::kBor: acc |= x; break;
      case ReduceOp::kBxor: acc ^= x; break;
      default: acc += x;
    }
    acc = extend(acc);
  }
  if (finish.kind == Finish::Scaling::kDivideTruncate) {
    acc = is_signed ? static_cast<std::uint64_t>(static_cast<std::int64_t>(acc) / finish.divisor)
                    : acc / static_cast<std::uint64_t>(finish.divisor);
  }
  return acc;
}

std::uint64_t combine_bool(const std::vector<std::uint64_t>& codes, ReduceOp op) {
  bool acc = codes[0] != 0;
  for (std::size_t k = 1; k < codes.size(); ++k) {
    const bool x = codes[k] != 0;
    if (op == ReduceOp::kBxor) {
      acc = acc != x;
    } else if (op == ReduceOp::kProduct || op == ReduceOp::kMin || op == ReduceOp::kBand) {
      acc = acc && x;
    } else {
      acc = acc || x;
    }
  }
  return acc ? 1 : 0;
}

void multiply_complex(double& re, double& im, double x, double y, bool wide) {
  // volatile for the doubles' sake, as above.
  volatile double rx = rounded(re * x, wide), iy = rounded(im * y, wide);
  volatile double ry = rounded(re * y, wide), ix = rounded(im * x, wide);
  re = rounded(rx - iy, wide);
  im = rounded(ry + ix, wide);
}

}  // namespace

double decode(DType dtype, std::uint64_t code) {
  if (dtype == DType::kFloat64) return bit_copy<double>(code);
  if (dtype == DType::kFloat32) return static_cast<double>(bit_copy<float>(static_cast<std::uint32_t>(code)));
  return decode_narrow(*format_of(dtype), code);
}

std::uint64_t encode(DType dtype, double value) {
  if (dtype == DType::kFloat64) {
    return std::isnan(value) ? 0x7ff8000000000000ull : bit_copy<std::uint64_t>(value);
  }
  if (dtype == DType::kFloat32) {
    return std::isnan(value) ? 0x7fc00000u : bit_copy<std::uint32_t>(static_cast<float>(value));
  }
  return encode_narrow(dtype, *format_of(dtype), value);
}

std::uint64_t load_code(DType dtype, const std::byte* from) {
  std::uint64_t code = 0;
  for (std::size_t b = 0; b < core::size_of(dtype); ++b) code |= static_cast<std::uint64_t>(from[b]) << (8 * b);
  return code;
}

void store_code(DType dtype, std::byte* to, std::uint64_t code) {
  for (std::size_t b = 0; b < core::size_of(dtype); ++b) to[b] = static_cast<std::byte>(code >> (8 * b));
}

void reference_combine(const std::vector<Input>& inputs, std::byte* out, std::size_t count, DType dtype, ReduceOp op,
                       Finish finish) {
  const std::size_t bytes = core::size_of(dtype);
  if (inputs.size() == 1 && finish.kind == Finish::Scaling::kNone && dtype != DType::kBool &&
      (op != ReduceOp::kPremulSum || inputs[0].premul == 1.0)) {
    std::memmove(out, inputs[0].data, count * bytes);
    return;
  }
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const DType part = dtype == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64;
  if (complex && op != ReduceOp::kProduct) return reference_combine(inputs, out, 2 * count, part, op, finish);

  std::vector<std::uint64_t> codes(inputs.size());
  for (std::size_t i = 0; i < count; ++i) {
    std::byte* to = out + i * bytes;
    if (complex) {
      const bool wide = part == DType::kFloat64;
      const auto real_part = [&](const Input& in) { return decode(part, load_code(part, in.data + i * bytes)); };
      const auto imag_part = [&](const Input& in) {
        return decode(part, load_code(part, in.data + i * bytes + bytes / 2));
      };
      double re = real_part(inputs[0]), im = imag_part(inputs[0]);
      for (std::size_t k = 1; k < inputs.size(); ++k) {
        multiply_complex(re, im, real_part(inputs[k]), imag_part(inputs[k]), wide);
      }
      if (finish.kind == Finish::Scaling::kMultiply) {
        re = rounded(re * rounded(finish.factor, wide), wide);
        im = rounded(im * rounded(finish.factor, wide), wide);
      }
      store_code(part, to, encode(part, re));
      store_code(part, to + bytes / 2, encode(part, im));
      continue;
    }
    for (std::size_t k = 0; k < inputs.size(); ++k) codes[k] = load_code(dtype, inputs[k].data + i * bytes);
    if (dtype == DType::kBool) {
      store_code(dtype, to, combine_bool(codes, op));
    } else if (core::is_floating(dtype)) {
      store_code(dtype, to, combine_real(codes, inputs, dtype, op, finish));
    } else {
      store_code(dtype, to, combine_integer(codes, dtype, op, finish));
    }
  }
}

std::vector<std::byte> random_elements(std::mt19937_64& random, DType dtype, std::size_t count, Data data) {
  std::vector<std::byte> bytes(count * core::size_of(dtype));
  if (data == Data::kAnyBits || !core::is_floating(dtype)) {
    // A quarter of the bytes at the extremes, where the special values are.
    for (std::byte& b : bytes) {
      const std::uint64_t r = random();
      constexpr unsigned kExtremes[] = {0x00, 0xff, 0x7f, 0x80, 0x01, 0xfe, 0x7c, 0xfc};
      b = static_cast<std::byte>(r % 4 == 0 ? kExtremes[(r >> 8) % 8] : (r >> 16) & 0xff);
    }
    return bytes;
  }
  DType part = dtype;
  if (dtype == DType::kComplex64) part = DType::kFloat32;
  if (dtype == DType::kComplex128) part = DType::kFloat64;
  std::uniform_real_distribution<double> distribution(-2.0, 2.0);
  for (std::size_t at = 0; at < bytes.size(); at += core::size_of(part)) {
    store_code(part, bytes.data() + at, encode(part, distribution(random)));
  }
  return bytes;
}

std::string describe(DType dtype, ReduceOp op, std::size_t n) {
  std::ostringstream text;
  text << core::name_of(dtype) << " " << core::name_of(op) << " n=" << n;
  return text.str();
}

std::string difference(DType dtype, const std::byte* got, const std::byte* want, std::size_t count) {
  const std::size_t bytes = core::size_of(dtype);
  if (count == 0 || std::memcmp(got, want, count * bytes) == 0) return "";
  std::size_t at = 0;
  while (std::memcmp(got + at, want + at, bytes) == 0) at += bytes;
  std::ostringstream text;
  text << "element " << at / bytes << " of " << count << std::hex << ": got 0x" << load_code(dtype, got + at)
       << ", want 0x" << load_code(dtype, want + at);
  return text.str();
}

}  // namespace hybridps::reduce::testing
