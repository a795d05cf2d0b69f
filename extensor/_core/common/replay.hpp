// Calls of kernels that are noted while a step is captured, and made again without Python.
//
// A binding that can be repeated calls its kernel with `launch`. The kernel captures by value what
// it reads and writes: pointers into arrays, which the replay keeps alive. A kernel that can do the
// work of the next one, too, has `std::optional<Kernel> joined(const Kernel& next) const`.
#pragma once

#include <memory>

#include "common/bind.hpp"

class Replay {
public:
    using Span = std::pair<uintptr_t, uintptr_t>;  // first byte, and the one after the last
    using Arrays = std::initializer_list<const py::array*>;

    // The result of call(), whose launches are noted.
    py::object record(const py::function& call) {
        struct Noting {
            Replay* before;
            explicit Noting(Replay* now) : before(current) { current = now; }
            ~Noting() { current = before; }
        } noting(this);
        return call();
    }

    // `constants`: other arrays that the kernel reads, which the replay keeps.
    template <class Kernel>
    void add(Arrays reads, Arrays writes, const Kernel& kernel, Arrays constants = {}) {
        calls_.push_back(std::make_shared<CallOf<Kernel>>(kernel));
        for (const py::array* x : constants) kept_.push_back(*x);
        reads_.emplace_back(), writes_.emplace_back();
        for (const py::array* x : reads) reads_.back().push_back(keep(*x));
        for (const py::array* x : writes) writes_.back().push_back(keep(*x));
    }

    // Also makes the calls of a later replay, after its own.
    void extend(const Replay& later) {
        const auto append = [](auto& to, const auto& from) {
            to.insert(to.end(), from.begin(), from.end());
        };
        for (const auto& call : later.calls_) {
            auto both = calls_.empty() ? nullptr : calls_.back()->joined(*call);
            if (both)
                calls_.back() = std::move(both);
            else
                calls_.push_back(call);
        }
        append(kept_, later.kept_);
        append(reads_, later.reads_), append(writes_, later.writes_);
    }

    void run() const {
        without_gil([&] {
            for (const auto& call : calls_) call->run();
        });
    }

    size_t size() const { return calls_.size(); }

    // Of each call, the memory that it reads and writes; calls that were joined count apart.
    std::vector<std::vector<Span>> reads_, writes_;

    static inline thread_local Replay* current = nullptr;

private:
    struct Call {
        virtual ~Call() = default;
        virtual void run() const = 0;
        // One call for this and the next; null if they stay apart.
        virtual std::shared_ptr<Call> joined(const Call& next) const = 0;
    };

    template <class Kernel>
    struct CallOf : Call {
        Kernel kernel;
        explicit CallOf(const Kernel& kernel) : kernel(kernel) {}
        void run() const override { kernel(); }
        std::shared_ptr<Call> joined([[maybe_unused]] const Call& next) const override {
            if constexpr (requires { kernel.joined(kernel); })
                if (const auto* same = dynamic_cast<const CallOf*>(&next))
                    if (auto both = kernel.joined(same->kernel))
                        return std::make_shared<CallOf>(*both);
            return nullptr;
        }
    };

    Span keep(const py::array& x) {
        kept_.push_back(x);
        const auto begin = reinterpret_cast<uintptr_t>(x.data());
        uintptr_t last = begin;
        for (py::ssize_t axis = 0; axis < x.ndim(); ++axis)
            last += static_cast<uintptr_t>(x.strides(axis) * (x.shape(axis) - 1));
        return {begin, last + static_cast<uintptr_t>(x.itemsize())};
    }

    std::vector<std::shared_ptr<Call>> calls_;
    std::vector<py::object> kept_;
};

// kernel() without Python's lock; noted where a step is captured.
template <class Kernel>
void launch(Replay::Arrays reads, Replay::Arrays writes, Kernel kernel,
            Replay::Arrays constants = {}) {
    if (Replay::current) Replay::current->add(reads, writes, kernel, constants);
    without_gil(kernel);
}
