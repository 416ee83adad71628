// A CUDA driver for machines without a device: device memory is host memory, kernels run in the
// simulator. It is for tests, so it is strict where a real driver happens to forgive:
//
// - What is given to a stream happens as late as allowed: when somebody waits for it, one piece at
//   a time when somebody asks whether it is done. A missing wait reads old data, every time.
// - New device memory is filled with 0xff, which is NaN in every floating-point format.
// - Calls need the current context that they say they need; handles must be alive.
// - Memory that work still uses cannot be unmapped or unregistered.
//
// Environment, read when it matters:
//   TIERKV_STANDIN_DEVICES  how many devices there are (1)
//   TIERKV_STANDIN_ARCH     their compute capability (9.0)
//   TIERKV_STANDIN_BYTES    memory of each (8 GiB)
//   TIERKV_STANDIN_KERNELS  a directory of simulated kernels: NAME.so for the kernel NAME of a module
//   TIERKV_STANDIN_FAIL     calls that fail: NAME=CODE every time, NAME@N=CODE the Nth time only,
//                           several with commas between; CODE is a CUresult
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "params.h"

namespace {

// CUresult, CUdevice_attribute and CUfunction_attribute, as in cuda.h.
enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
};

struct Meaning {
    Result code;
    const char *name, *text;
};

constexpr Meaning meanings[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image for the device"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

constexpr int MULTIPROCESSORS = 132;
constexpr int SHARED_PER_BLOCK = 48 << 10;
constexpr int SHARED_PER_BLOCK_OPTIN = 227 << 10;
constexpr int SHARED_PER_MULTIPROCESSOR = 228 << 10;
constexpr int THREADS_PER_MULTIPROCESSOR = 2048;
constexpr size_t GRANULARITY = 2 << 20;

using Address = uint64_t;

struct Range {
    Address begin;
    size_t size;
    bool contains(Address at, size_t n) const {
        return at >= begin && n <= size && at - begin <= size - n;
    }
    bool overlaps(const Range &other) const {
        return begin < other.begin + other.size && other.begin < begin + size;
    }
};

struct Context {
    int device = 0;
    int users = 0;
    size_t used_bytes = 0;
};

struct Work {
    std::function<void()> run;
    std::vector<Range> uses = {};
    bool uses_anything = false;
};

struct Stream {
    Context *context;
    uint64_t issued = 0, done = 0;
    std::deque<Work> waiting = {};
};

struct Event {
    Context *context;
    Stream *stream = nullptr;  // null: not recorded
    uint64_t position = 0;     // reached when the stream has done so many
    double seconds = 0;
};

struct Module {
    Context *context;
    std::string image;
};

// What the simulator exports, see cusim.cc: one variant of the kernels in each library.
struct Simulated {
    int (*launch)(const char *, unsigned grid, unsigned block, unsigned shared, void **arguments);
    const char *(*error)();
};

// A kernel of params.h; its variants have names that begin with this one.
struct Kernel {
    const char *name;
    size_t parameter_bytes;
};

constexpr Kernel kernels[] = {
    {"paged_attention", sizeof(AttentionParams)},
    {"merge_partials", sizeof(MergeParams)},
    {"move_pieces", sizeof(MoveParams)},
    {"write_kv", sizeof(WriteParams)},
};

struct Function {
    Module *module;
    std::string name;
    const Kernel *kernel;
    Simulated simulated;
    int max_dynamic_shared = SHARED_PER_BLOCK;
};

struct Allocation {  // of cuMemCreate
    int fd;
    size_t size;
    int device;
    int holders;  // its handle, and its mapping
};

struct Reservation {
    size_t size;
    Allocation *mapped = nullptr;
    bool accessible = false;
};

struct State {
    std::recursive_mutex lock;
    bool ready = false;
    std::map<int, Context> contexts;
    std::map<Context *, Stream *> default_streams;
    std::set<Stream *> streams;
    std::set<Event *> events;
    std::set<Module *> modules;
    std::set<Function *> functions;
    std::map<Address, std::pair<size_t, Context *>> plain;  // of cuMemAlloc
    std::set<Allocation *> allocations;
    std::map<Address, Reservation> reservations;
    std::map<Address, size_t> registered;
    std::map<std::string, int> calls;
    int failed = SUCCESS;  // of a kernel, for the next call that waits to report
};

State &state() {
    static State *all = new State;  // never destroyed: other threads may outlive static objects
    return *all;
}

thread_local std::vector<Context *> context_stack;

size_t number_from(const char *variable, size_t otherwise) {
    const char *text = std::getenv(variable);
    return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

int devices() { return static_cast<int>(number_from("TIERKV_STANDIN_DEVICES", 1)); }

size_t memory_bytes() { return number_from("TIERKV_STANDIN_BYTES", size_t{8} << 30); }

void capability(int &major, int &minor) {
    const char *text = std::getenv("TIERKV_STANDIN_ARCH");
    if (!text || std::sscanf(text, "%d.%d", &major, &minor) != 2) major = 9, minor = 0;
}

double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// The failure that TIERKV_STANDIN_FAIL orders for this call of the function, else SUCCESS.
int ordered_failure(const char *name) {
    int nth = ++state().calls[name];
    const char *orders = std::getenv("TIERKV_STANDIN_FAIL");
    if (!orders) return SUCCESS;
    std::string rest = orders;
    while (!rest.empty()) {
        size_t comma = rest.find(',');
        std::string order = rest.substr(0, comma);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        size_t equals = order.find('=');
        if (equals == std::string::npos) continue;
        std::string who = order.substr(0, equals);
        int code = std::atoi(order.c_str() + equals + 1);
        if (who == name || who == std::string(name) + "@" + std::to_string(nth)) return code;
    }
    return SUCCESS;
}

#define ENTER                                            \
    State &all = state();                                \
    std::lock_guard<std::recursive_mutex> hold(all.lock); \
    if (int failure = ordered_failure(__func__)) return failure; \
    if (!all.ready) return NOT_INITIALIZED

#define ENTER_CONTEXT                                      \
    ENTER;                                                 \
    if (context_stack.empty() || !context_stack.back()->users) return INVALID_CONTEXT; \
    [[maybe_unused]] Context *context = context_stack.back()

#define REQUIRE(condition, failure) \
    if (!(condition)) return failure

template <class Handle>
bool is_live(const std::set<Handle *> &live, void *handle) {
    return live.count(static_cast<Handle *>(handle));
}

// The stream behind a handle, null if it is of another context or dead. 0 is the default stream.
Stream *stream_of(State &all, Context *context, void *handle) {
    if (!handle) {
        Stream *&stream = all.default_streams[context];
        if (!stream) stream = new Stream{context};
        return stream;
    }
    Stream *stream = static_cast<Stream *>(handle);
    return is_live(all.streams, handle) && stream->context == context ? stream : nullptr;
}

void run_until(Stream &stream, uint64_t position) {
    while (stream.done < position && !stream.waiting.empty()) {
        Work work = std::move(stream.waiting.front());
        stream.waiting.pop_front();
        work.run();
        ++stream.done;
    }
}

void give(Stream &stream, Work work) {
    stream.waiting.push_back(std::move(work));
    ++stream.issued;
}

template <class Visit>
void for_each_stream(State &all, Visit visit) {
    for (Stream *stream : all.streams) visit(*stream);
    for (auto &[_, stream] : all.default_streams) visit(*stream);
}

void run_everything(State &all) {
    for_each_stream(all, [](Stream &stream) { run_until(stream, stream.issued); });
}

bool is_in_use(State &all, const Range &range) {
    bool found = false;
    for_each_stream(all, [&](Stream &stream) {
        for (const Work &work : stream.waiting) {
            found |= work.uses_anything;
            for (const Range &used : work.uses) found |= used.overlaps(range);
        }
    });
    return found;
}

bool is_device_memory(State &all, Address at, size_t n) {
    for (auto &[begin, plain] : all.plain)
        if (Range{begin, plain.first}.contains(at, n)) return true;
    for (auto &[begin, reserved] : all.reservations)
        if (reserved.accessible && Range{begin, reserved.size}.contains(at, n)) return true;
    return false;
}

bool is_registered(State &all, Address at, size_t n) {
    for (auto &[begin, size] : all.registered)
        if (Range{begin, size}.contains(at, n)) return true;
    return false;
}

// Whether a part of the memory is registered and another is not, or not together.
bool is_half_registered(State &all, Address at, size_t n) {
    if (is_registered(all, at, n)) return false;
    for (auto &[begin, size] : all.registered)
        if (Range{begin, size}.overlaps({at, n})) return true;
    return false;
}

Address address_of(const void *pointer) { return reinterpret_cast<Address>(pointer); }

void *pointer_to(Address address) { return reinterpret_cast<void *>(address); }

Work copy_work(Address target, Address source, size_t n) {
    return {[=] { std::memmove(pointer_to(target), pointer_to(source), n); },
            {{target, n}, {source, n}}};
}

void let_go(State &all, Allocation *allocation) {
    if (--allocation->holders) return;
    close(allocation->fd);
    all.contexts[allocation->device].used_bytes -= allocation->size;
    all.allocations.erase(allocation);
    delete allocation;
}

// Bytes of an ELF file, whose length the caller of cuModuleLoadData does not tell.
size_t elf_size(const char *image) {
    Elf64_Ehdr head;
    std::memcpy(&head, image, sizeof head);
    size_t end = head.e_shoff + size_t{head.e_shnum} * head.e_shentsize;
    end = std::max(end, head.e_phoff + size_t{head.e_phnum} * head.e_phentsize);
    for (int i = 0; i < head.e_shnum; ++i) {
        Elf64_Shdr section;
        std::memcpy(&section, image + head.e_shoff + size_t(i) * head.e_shentsize, sizeof section);
        if (section.sh_type != SHT_NOBITS) end = std::max(end, section.sh_offset + section.sh_size);
    }
    return end;
}

struct MemLocation {
    int type, id;
};

struct MemAllocationProp {
    int type, requested_handle_types;
    MemLocation location;
    void *win32;
    unsigned char flags[8];
};

struct MemAccessDesc {
    MemLocation location;
    int flags;
};

bool find_simulated(const std::string &name, const Kernel *&kernel, Simulated &simulated) {
    const char *directory = std::getenv("TIERKV_STANDIN_KERNELS");
    if (!directory) return false;
    for (const Kernel &known : kernels)
        if (!name.compare(0, std::strlen(known.name), known.name)) kernel = &known;
    void *library = dlopen((directory + ("/" + name) + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library || !kernel) return false;
    void *launch = dlsym(library, "cusim_launch"), *error = dlsym(library, "cusim_error");
    simulated = {reinterpret_cast<decltype(Simulated::launch)>(launch),
                 reinterpret_cast<decltype(Simulated::error)>(error)};
    return launch && error;
}

int failure_so_far(State &all) { return std::exchange(all.failed, SUCCESS); }

bool is_shareable(const MemAllocationProp *prop) {
    return prop->type == 1 && prop->requested_handle_types == 1 && prop->location.type == 1 &&
           prop->location.id >= 0 && prop->location.id < devices() && !prop->win32;
}

}  // namespace

extern "C" {

// How many objects have been made and not been destroyed: nothing a test leaves may be among them.
int standin_live_objects() {
    State &all = state();
    std::lock_guard<std::recursive_mutex> hold(all.lock);
    size_t count = all.streams.size() + all.events.size() + all.modules.size() + all.plain.size() +
                   all.allocations.size() + all.reservations.size() + all.registered.size();
    for (auto &[_, context] : all.contexts) count += context.users;
    return static_cast<int>(count);
}

int cuGetErrorName(int code, const char **text) {
    for (const Meaning &meaning : meanings)
        if (meaning.code == code) return *text = meaning.name, SUCCESS;
    return INVALID_VALUE;
}

int cuGetErrorString(int code, const char **text) {
    for (const Meaning &meaning : meanings)
        if (meaning.code == code) return *text = meaning.text, SUCCESS;
    return INVALID_VALUE;
}

int cuInit(unsigned flags) {
    State &all = state();
    std::lock_guard<std::recursive_mutex> hold(all.lock);
    if (int failure = ordered_failure(__func__)) return failure;
    REQUIRE(!flags, INVALID_VALUE);
    REQUIRE(devices() > 0, NO_DEVICE);
    all.ready = true;
    return SUCCESS;
}

int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }

int cuDeviceGetCount(int *count) {
    ENTER;
    return *count = devices(), SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    ENTER;
    REQUIRE(ordinal >= 0 && ordinal < devices(), INVALID_DEVICE);
    return *device = ordinal, SUCCESS;
}

int cuDeviceGetName(char *name, int room, int device) {
    ENTER;
    REQUIRE(device >= 0 && device < devices(), INVALID_DEVICE);
    std::snprintf(name, room, "simulated device %d", device);
    return SUCCESS;
}

int cuDeviceGetUuid_v2(char *uuid, int device) {
    ENTER;
    REQUIRE(device >= 0 && device < devices(), INVALID_DEVICE);
    std::memcpy(uuid, "simulated device", 16);
    uuid[15] = static_cast<char>(device);
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER;
    REQUIRE(device >= 0 && device < devices(), INVALID_DEVICE);
    int major, minor;
    capability(major, minor);
    switch (attribute) {
        case 16: *value = MULTIPROCESSORS; break;
        case 38: *value = 50 << 20; break;
        case 75: *value = major; break;
        case 76: *value = minor; break;
        case 81: *value = SHARED_PER_MULTIPROCESSOR; break;
        case 88: *value = 1; break;  // host memory needs no registration to be used by kernels
        case 97: *value = SHARED_PER_BLOCK_OPTIN; break;
        case 102: case 103: *value = 1; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *size, int device) {
    ENTER;
    REQUIRE(device >= 0 && device < devices(), INVALID_DEVICE);
    return *size = memory_bytes(), SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **handle, int device) {
    ENTER;
    REQUIRE(device >= 0 && device < devices(), INVALID_DEVICE);
    Context &context = all.contexts[device];
    context.device = device;
    ++context.users;
    return *handle = &context, SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER;
    auto found = all.contexts.find(device);
    REQUIRE(found != all.contexts.end() && found->second.users, INVALID_CONTEXT);
    if (!--found->second.users) run_everything(all);
    return SUCCESS;
}

int cuCtxGetCurrent(void **handle) {
    ENTER;
    return *handle = context_stack.empty() ? nullptr : context_stack.back(), SUCCESS;
}

int cuCtxPushCurrent_v2(void *handle) {
    ENTER;
    for (auto &[_, context] : all.contexts)
        if (&context == handle && context.users) return context_stack.push_back(&context), SUCCESS;
    return INVALID_CONTEXT;
}

int cuCtxPopCurrent_v2(void **handle) {
    ENTER;
    REQUIRE(!context_stack.empty(), INVALID_CONTEXT);
    *handle = context_stack.back();
    context_stack.pop_back();
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER_CONTEXT;
    *total = memory_bytes();
    *free = *total - std::min(*total, context->used_bytes);
    return SUCCESS;
}

int cuModuleLoadData(void **handle, const void *data) {
    ENTER_CONTEXT;
    const char *image = static_cast<const char *>(data);
    if (std::memcmp(image, ELFMAG, SELFMAG)) {  // then it is PTX, which is text
        REQUIRE(std::strstr(image, ".target sm_"), INVALID_IMAGE);
        *handle = *all.modules.insert(new Module{context, image}).first;
        return SUCCESS;
    }
    Elf64_Ehdr head;
    std::memcpy(&head, image, sizeof head);
    int major, minor;
    capability(major, minor);
    // ptxas of CUDA 13 writes the architecture in the second byte, older ones in the first.
    int made_for = head.e_flags >> 8 & 0xff;
    if (head.e_ident[EI_ABIVERSION] < 8) made_for = head.e_flags & 0xff;
    REQUIRE(head.e_machine == 190, INVALID_IMAGE);  // EM_CUDA
    REQUIRE(made_for / 10 == major && made_for % 10 <= minor, NO_BINARY_FOR_GPU);
    std::string whole(image, elf_size(image));
    *handle = *all.modules.insert(new Module{context, whole}).first;
    return SUCCESS;
}

int cuModuleUnload(void *handle) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.modules, handle), INVALID_HANDLE);
    run_everything(all);
    for (auto at = all.functions.begin(); at != all.functions.end();) {
        Function *function = *at++;
        if (function->module != handle) continue;
        all.functions.erase(function);
        delete function;
    }
    all.modules.erase(static_cast<Module *>(handle));
    delete static_cast<Module *>(handle);
    return SUCCESS;
}

int cuModuleGetFunction(void **handle, void *module_handle, const char *name) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.modules, module_handle), INVALID_HANDLE);
    Module *module = static_cast<Module *>(module_handle);
    REQUIRE(module->image.find(name) != std::string::npos, NOT_FOUND);
    const Kernel *kernel = nullptr;
    Simulated simulated{};
    REQUIRE(find_simulated(name, kernel, simulated), NOT_FOUND);
    *handle = *all.functions.insert(new Function{module, name, kernel, simulated}).first;
    return SUCCESS;
}

int cuFuncGetAttribute(int *value, int attribute, void *handle) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.functions, handle), INVALID_HANDLE);
    switch (attribute) {
        case 3: *value = 0; break;
        case 4: *value = 168; break;
        case 8: *value = static_cast<Function *>(handle)->max_dynamic_shared; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}

int cuFuncSetAttribute(void *handle, int attribute, int value) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.functions, handle), INVALID_HANDLE);
    REQUIRE(attribute == 8 && value >= 0 && value <= SHARED_PER_BLOCK_OPTIN, INVALID_VALUE);
    static_cast<Function *>(handle)->max_dynamic_shared = value;
    return SUCCESS;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *handle, int threads,
                                                size_t shared) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.functions, handle), INVALID_HANDLE);
    REQUIRE(threads > 0 && threads <= 1024, INVALID_VALUE);
    size_t by_shared = SHARED_PER_MULTIPROCESSOR / (shared + 1024);
    *count = std::min<size_t>(THREADS_PER_MULTIPROCESSOR / threads, by_shared);
    return SUCCESS;
}

int cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                   void *stream_handle, void **arguments, void **extra) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.functions, handle), INVALID_HANDLE);
    Function *function = static_cast<Function *>(handle);
    Stream *stream = stream_of(all, context, stream_handle);
    REQUIRE(stream, INVALID_HANDLE);
    REQUIRE(arguments && !extra && block_y == 1 && block_z == 1, INVALID_VALUE);
    REQUIRE(block_x >= 1 && block_x <= 1024, INVALID_VALUE);
    REQUIRE(grid_x && grid_y && grid_z && grid_x < 1u << 31, INVALID_VALUE);
    REQUIRE(grid_y < 1u << 16 && grid_z < 1u << 16, INVALID_VALUE);
    REQUIRE(static_cast<int>(shared) <= function->max_dynamic_shared, INVALID_VALUE);
    REQUIRE(grid_y == 1 && grid_z == 1, INVALID_VALUE);  // all that the simulator knows
    std::string name = function->name;
    Simulated simulated = function->simulated;
    std::string parameters(static_cast<const char *>(arguments[0]),
                           function->kernel->parameter_bytes);
    give(*stream, {[=, &all] {
                       void *pointer = const_cast<char *>(parameters.data());
                       if (!simulated.launch(name.c_str(), grid_x, block_x, shared, &pointer)) return;
                       std::fprintf(stderr, "%s: %s\n", name.c_str(), simulated.error());
                       all.failed = LAUNCH_FAILED;
                   },
                   {}, true});
    return SUCCESS;
}

int cuCtxSynchronize() {
    ENTER_CONTEXT;
    for_each_stream(all, [=](Stream &stream) {
        if (stream.context == context) run_until(stream, stream.issued);
    });
    return SUCCESS;
}

int cuStreamCreate(void **handle, unsigned flags) {
    ENTER_CONTEXT;
    REQUIRE(flags <= 1, INVALID_VALUE);
    return *handle = *all.streams.insert(new Stream{context}).first, SUCCESS;
}

int cuStreamDestroy_v2(void *handle) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.streams, handle), INVALID_HANDLE);
    Stream *stream = static_cast<Stream *>(handle);
    run_until(*stream, stream->issued);
    for (Event *event : all.events)
        if (event->stream == stream) event->stream = nullptr;
    all.streams.erase(stream);
    delete stream;
    return SUCCESS;
}

int cuStreamSynchronize(void *handle) {
    ENTER_CONTEXT;
    Stream *stream = stream_of(all, context, handle);
    REQUIRE(stream, INVALID_HANDLE);
    run_until(*stream, stream->issued);
    return failure_so_far(all);
}

int cuStreamQuery(void *handle) {
    ENTER_CONTEXT;
    Stream *stream = stream_of(all, context, handle);
    REQUIRE(stream, INVALID_HANDLE);
    if (stream->done == stream->issued) return failure_so_far(all);
    run_until(*stream, stream->done + 1);
    return NOT_READY;
}

int cuStreamWaitEvent(void *handle, void *event_handle, unsigned flags) {
    ENTER_CONTEXT;
    Stream *stream = stream_of(all, context, handle);
    REQUIRE(stream && is_live(all.events, event_handle), INVALID_HANDLE);
    REQUIRE(!flags, INVALID_VALUE);
    Event *event = static_cast<Event *>(event_handle);
    Stream *other = event->stream;
    if (!other || other->done >= event->position) return SUCCESS;
    uint64_t position = event->position;
    give(*stream, {[=, &all] {
                       for_each_stream(all, [=](Stream &stream) {
                           if (&stream == other) run_until(stream, position);
                       });
                   },
                   {}});
    return SUCCESS;
}

int cuEventCreate(void **handle, unsigned flags) {
    ENTER_CONTEXT;
    REQUIRE(flags <= 3, INVALID_VALUE);
    return *handle = *all.events.insert(new Event{context}).first, SUCCESS;
}

int cuEventDestroy_v2(void *handle) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.events, handle), INVALID_HANDLE);
    all.events.erase(static_cast<Event *>(handle));
    delete static_cast<Event *>(handle);
    return SUCCESS;
}

int cuEventRecord(void *handle, void *stream_handle) {
    ENTER_CONTEXT;
    Stream *stream = stream_of(all, context, stream_handle);
    REQUIRE(stream && is_live(all.events, handle), INVALID_HANDLE);
    Event *event = static_cast<Event *>(handle);
    REQUIRE(event->context == context, INVALID_HANDLE);
    give(*stream, {[=, &all] {
                       if (is_live(all.events, event)) event->seconds = now();
                   },
                   {}});
    event->stream = stream;
    event->position = stream->issued;
    return SUCCESS;
}

int cuEventQuery(void *handle) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.events, handle), INVALID_HANDLE);
    Event *event = static_cast<Event *>(handle);
    if (!event->stream || event->stream->done >= event->position) return SUCCESS;
    run_until(*event->stream, event->stream->done + 1);
    return NOT_READY;
}

int cuEventSynchronize(void *handle) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.events, handle), INVALID_HANDLE);
    Event *event = static_cast<Event *>(handle);
    if (event->stream) run_until(*event->stream, event->position);
    return failure_so_far(all);
}

int cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    ENTER_CONTEXT;
    REQUIRE(is_live(all.events, from) && is_live(all.events, to), INVALID_HANDLE);
    Event *first = static_cast<Event *>(from), *second = static_cast<Event *>(to);
    REQUIRE(first->stream && second->stream, INVALID_HANDLE);
    REQUIRE(first->stream->done >= first->position, NOT_READY);
    REQUIRE(second->stream->done >= second->position, NOT_READY);
    return *milliseconds = static_cast<float>((second->seconds - first->seconds) * 1e3), SUCCESS;
}

int cuMemAlloc_v2(Address *address, size_t size) {
    ENTER_CONTEXT;
    REQUIRE(size, INVALID_VALUE);
    REQUIRE(context->used_bytes + size <= memory_bytes(), OUT_OF_MEMORY);
    void *memory = std::aligned_alloc(512, (size + 511) / 512 * 512);
    REQUIRE(memory, OUT_OF_MEMORY);
    std::memset(memory, 0xff, size);
    *address = address_of(memory);
    all.plain[*address] = {size, context};
    context->used_bytes += size;
    return SUCCESS;
}

int cuMemFree_v2(Address address) {
    ENTER_CONTEXT;
    auto found = all.plain.find(address);
    REQUIRE(found != all.plain.end(), INVALID_VALUE);
    run_everything(all);  // as the real one waits
    found->second.second->used_bytes -= found->second.first;
    all.plain.erase(found);
    std::free(pointer_to(address));
    return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(Address target, const void *source, size_t n, void *handle) {
    ENTER_CONTEXT;
    Stream *stream = stream_of(all, context, handle);
    REQUIRE(stream, INVALID_HANDLE);
    REQUIRE(is_device_memory(all, target, n), INVALID_VALUE);
    REQUIRE(!is_half_registered(all, address_of(source), n), INVALID_VALUE);
    if (is_registered(all, address_of(source), n)) {
        give(*stream, copy_work(target, address_of(source), n));
        return SUCCESS;
    }
    std::string staged(static_cast<const char *>(source), n);  // memory that is not pinned
    give(*stream, {[=] { std::memcpy(pointer_to(target), staged.data(), n); }, {{target, n}}});
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void *target, Address source, size_t n, void *handle) {
    ENTER_CONTEXT;
    Stream *stream = stream_of(all, context, handle);
    REQUIRE(stream, INVALID_HANDLE);
    REQUIRE(is_device_memory(all, source, n), INVALID_VALUE);
    REQUIRE(!is_half_registered(all, address_of(target), n), INVALID_VALUE);
    give(*stream, copy_work(address_of(target), source, n));
    if (!is_registered(all, address_of(target), n)) run_until(*stream, stream->issued);
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(Address target, Address source, size_t n, void *handle) {
    ENTER_CONTEXT;
    Stream *stream = stream_of(all, context, handle);
    REQUIRE(stream, INVALID_HANDLE);
    REQUIRE(is_device_memory(all, target, n) && is_device_memory(all, source, n), INVALID_VALUE);
    give(*stream, copy_work(target, source, n));
    return SUCCESS;
}

int cuMemsetD8Async(Address target, unsigned char byte, size_t n, void *handle) {
    ENTER_CONTEXT;
    Stream *stream = stream_of(all, context, handle);
    REQUIRE(stream, INVALID_HANDLE);
    REQUIRE(is_device_memory(all, target, n), INVALID_VALUE);
    give(*stream, {[=] { std::memset(pointer_to(target), byte, n); }, {{target, n}}});
    return SUCCESS;
}

int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
    ENTER_CONTEXT;
    REQUIRE(memory && size && flags <= 15, INVALID_VALUE);
    Range range{address_of(memory), size};
    for (auto &[begin, length] : all.registered)
        REQUIRE(!range.overlaps({begin, length}), HOST_MEMORY_ALREADY_REGISTERED);
    return all.registered[range.begin] = size, SUCCESS;
}

int cuMemHostUnregister(void *memory) {
    ENTER_CONTEXT;
    auto found = all.registered.find(address_of(memory));
    REQUIRE(found != all.registered.end(), HOST_MEMORY_NOT_REGISTERED);
    REQUIRE(!is_in_use(all, {found->first, found->second}), ILLEGAL_ADDRESS);
    return all.registered.erase(found), SUCCESS;
}

int cuMemGetAllocationGranularity(size_t *size, const MemAllocationProp *prop, int option) {
    ENTER;
    REQUIRE(is_shareable(prop) && (option == 0 || option == 1), INVALID_VALUE);
    return *size = GRANULARITY, SUCCESS;
}

int cuMemCreate(uint64_t *handle, size_t size, const MemAllocationProp *prop, uint64_t flags) {
    ENTER;
    REQUIRE(size && size % GRANULARITY == 0 && !flags && is_shareable(prop), INVALID_VALUE);
    int device = prop->location.id;
    size_t &used = all.contexts[device].used_bytes;
    REQUIRE(used + size <= memory_bytes(), OUT_OF_MEMORY);
    int fd = memfd_create("simulated device memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size))) return OUT_OF_MEMORY;
    used += size;
    Allocation *allocation = new Allocation{fd, size, device, 1};
    all.allocations.insert(allocation);
    return *handle = address_of(allocation), SUCCESS;
}

int cuMemRelease(uint64_t handle) {
    ENTER;
    REQUIRE(is_live(all.allocations, pointer_to(handle)), INVALID_VALUE);
    return let_go(all, static_cast<Allocation *>(pointer_to(handle))), SUCCESS;
}

int cuMemAddressReserve(Address *address, size_t size, size_t alignment, Address, uint64_t flags) {
    ENTER;
    REQUIRE(size && size % GRANULARITY == 0 && !alignment && !flags, INVALID_VALUE);
    void *room = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(room != MAP_FAILED, OUT_OF_MEMORY);
    *address = address_of(room);
    all.reservations[*address] = {size};
    return SUCCESS;
}

int cuMemAddressFree(Address address, size_t size) {
    ENTER;
    auto found = all.reservations.find(address);
    REQUIRE(found != all.reservations.end() && found->second.size == size, INVALID_VALUE);
    REQUIRE(!found->second.mapped, INVALID_VALUE);
    munmap(pointer_to(address), size);
    return all.reservations.erase(found), SUCCESS;
}

int cuMemMap(Address address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    ENTER;
    auto found = all.reservations.find(address);
    REQUIRE(found != all.reservations.end() && found->second.size == size, INVALID_VALUE);
    REQUIRE(!found->second.mapped && !offset && !flags, INVALID_VALUE);
    REQUIRE(is_live(all.allocations, pointer_to(handle)), INVALID_VALUE);
    Allocation *allocation = static_cast<Allocation *>(pointer_to(handle));
    REQUIRE(allocation->size == size, INVALID_VALUE);
    void *mapped = mmap(pointer_to(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED,
                        allocation->fd, 0);
    REQUIRE(mapped != MAP_FAILED, OUT_OF_MEMORY);
    ++allocation->holders;
    return found->second.mapped = allocation, SUCCESS;
}

int cuMemUnmap(Address address, size_t size) {
    ENTER;
    auto found = all.reservations.find(address);
    REQUIRE(found != all.reservations.end() && found->second.size == size, INVALID_VALUE);
    REQUIRE(found->second.mapped, INVALID_VALUE);
    REQUIRE(!is_in_use(all, {address, size}), ILLEGAL_ADDRESS);
    mmap(pointer_to(address), size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    let_go(all, found->second.mapped);
    found->second.mapped = nullptr;
    found->second.accessible = false;
    return SUCCESS;
}

int cuMemSetAccess(Address address, size_t size, const MemAccessDesc *access, size_t count) {
    ENTER;
    auto found = all.reservations.find(address);
    REQUIRE(found != all.reservations.end() && found->second.size == size, INVALID_VALUE);
    REQUIRE(found->second.mapped && count == 1, INVALID_VALUE);
    REQUIRE(access->location.type == 1 && access->flags == 3, INVALID_VALUE);
    REQUIRE(access->location.id == found->second.mapped->device, INVALID_DEVICE);
    REQUIRE(!mprotect(pointer_to(address), size, PROT_READ | PROT_WRITE), OUT_OF_MEMORY);
    return found->second.accessible = true, SUCCESS;
}

int cuMemExportToShareableHandle(void *fd, uint64_t handle, int type, uint64_t flags) {
    ENTER;
    REQUIRE(is_live(all.allocations, pointer_to(handle)), INVALID_VALUE);
    REQUIRE(type == 1 && !flags, NOT_SUPPORTED);
    int copy = dup(static_cast<Allocation *>(pointer_to(handle))->fd);
    REQUIRE(copy >= 0, OUT_OF_MEMORY);
    return std::memcpy(fd, &copy, sizeof copy), SUCCESS;
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *fd, int type) {
    ENTER;
    REQUIRE(type == 1, NOT_SUPPORTED);
    struct stat about;
    int own = dup(static_cast<int>(address_of(fd)));
    REQUIRE(own >= 0, INVALID_VALUE);
    if (fstat(own, &about) || !about.st_size || about.st_size % GRANULARITY) {
        close(own);
        return INVALID_VALUE;
    }
    size_t size = static_cast<size_t>(about.st_size);
    Allocation *allocation = new Allocation{own, size, 0, 1};
    all.allocations.insert(allocation);
    all.contexts[0].used_bytes += size;
    return *handle = address_of(allocation), SUCCESS;
}

}  // extern "C"
