// Included after CUDA_SOURCE: makes each kernel callable from an array of argument addresses, with a description of
// its parameters that the launcher checks ('p' a pointer, 'i4' 'u4' 'i8' 'u8' 'f4' 'f8' a scalar).
#pragma once

template <class T> struct kbsub_code { static constexpr const char* text = "?"; };
template <class T> struct kbsub_code<T*> { static constexpr const char* text = "p"; };
template <> struct kbsub_code<int> { static constexpr const char* text = "i4"; };
template <> struct kbsub_code<unsigned> { static constexpr const char* text = "u4"; };
template <> struct kbsub_code<long> { static constexpr const char* text = "i8"; };
template <> struct kbsub_code<long long> { static constexpr const char* text = "i8"; };
template <> struct kbsub_code<unsigned long> { static constexpr const char* text = "u8"; };
template <> struct kbsub_code<unsigned long long> { static constexpr const char* text = "u8"; };
template <> struct kbsub_code<float> { static constexpr const char* text = "f4"; };
template <> struct kbsub_code<double> { static constexpr const char* text = "f8"; };

template <class T> struct kbsub_plain { typedef T type; };
template <class T> struct kbsub_plain<const T> { typedef T type; };

template <int...> struct kbsub_numbers {};

template <class... A, int... I>
inline __attribute__((always_inline)) void kbsub_apply(void (*kernel)(A...), void** arguments, kbsub_numbers<I...>)
{
    kernel(*static_cast<typename kbsub_plain<A>::type*>(arguments[I])...);
}
template <class... A>
inline __attribute__((always_inline)) void kbsub_call(void (*kernel)(A...), void** arguments)
{
    kbsub_apply(kernel, arguments, kbsub_numbers<__integer_pack(sizeof...(A))...>());
}
template <class... A>
const char* const* kbsub_signature(void (*)(A...))
{
    static const char* const codes[] = {kbsub_code<typename kbsub_plain<A>::type>::text..., nullptr};
    return codes;
}

#define KBSUB_EXPORT(name) \
    extern "C" void kbsub_call_##name(void** arguments) { kbsub_call(&name, arguments); } \
    extern "C" const char* const* kbsub_signature_##name() { return kbsub_signature(&name); }

// ---- shared memory ----
// `shared_memory` is defined in assembly: the compiler must not learn a size for it. The 16 bytes before it keep its
// offset from being 0, the one under which the compiler asks for the start of all static variables.
asm(".pushsection .tbss,\"awT\",@nobits\n"
    ".balign 16\n"
    ".globl shared_memory\n"
    ".hidden shared_memory\n"
    ".type shared_memory,@object\n"
    ".zero 16\n"
    "shared_memory: .zero 16\n"
    ".size shared_memory,16\n"
    ".popsection\n");
extern "C" thread_local unsigned char kbsub_probe[] asm("shared_memory");

unsigned long kbsub_dynamic_offset;
static bool kbsub_probing;
static unsigned long kbsub_probed_offset;

// Every access to a __shared__ variable comes here (the library is built with the general-dynamic TLS model).
extern "C" void* __tls_get_addr(kbsub_tls_index* index)
{
    if (kbsub_probing)
        kbsub_probed_offset = index->offset;
    if (index->offset == kbsub_dynamic_offset)
        return kbsub_dynamic_base;
    return kbsub_static_base + index->offset;
}
extern "C" __attribute__((noinline)) unsigned char* kbsub_touch_dynamic() { return kbsub_probe; }

// Called once after loading.
extern "C" void kbsub_find_dynamic()
{
    kbsub_dynamic_offset = ~0ul;
    kbsub_probing = true;
    asm volatile("" : : "r"(kbsub_touch_dynamic()) : "memory");
    kbsub_probing = false;
    kbsub_dynamic_offset = kbsub_probed_offset;
}
