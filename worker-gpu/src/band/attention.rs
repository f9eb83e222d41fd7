//! Which steps before an attention step run in its first launch: splitting, norms and rotations of heads.

use super::plan::Op;
use crate::hip::DeviceSlice;
use spillway_model::program::{Buf, Step};
use spillway_worker::fuse::reads;

/// What the attention step does to the heads of a buffer first.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct HeadPlan {
    pub norm: Option<(DeviceSlice, f32)>,
    /// Number of a rotary embedding.
    pub rope: Option<usize>,
}

/// Buffers of an attention step, and what happens to them first.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionBufs {
    pub q: Buf,
    pub k: Buf,
    pub v: Buf,
    pub gate: Option<Buf>,
    pub dst: Buf,
    /// Holds every query head with its gate, `[query | gate]`, instead of `q` and `gate`.
    pub joined: Option<Buf>,
    pub q_plan: HeadPlan,
    pub k_plan: HeadPlan,
}

impl AttentionBufs {
    /// Takes over operations at the end of `ops` that only prepare queries, keys and gate, heads of `head_dim`. None of these
    /// buffers may be read by a `later` step, since they keep what they held.
    pub fn absorb(&mut self, ops: &mut Vec<Op>, head_dim: usize, later: &[Step]) {
        let own = [Some(self.q), Some(self.k), self.gate];
        let read_later = |buf: &Buf| later.iter().any(|step| reads(step).contains(&Some(*buf)));
        if own.iter().flatten().any(read_later) {
            return;
        }
        while ops.last().is_some_and(|op| self.take(op, head_dim)) {
            ops.pop();
        }
    }

    /// Takes over one operation, the one before all that were taken over.
    fn take(&mut self, op: &Op, width: usize) -> bool {
        match *op {
            Op::Rope { buf, head_dim, rope } if head_dim == width => match self.heads(buf) {
                Some(plan @ HeadPlan { norm: None, rope: None }) => plan.rope = Some(rope),
                _ => return false,
            },
            Op::HeadNorm { buf, norm } if norm.width == width => match self.heads(buf) {
                Some(plan @ HeadPlan { norm: None, .. }) => plan.norm = Some((norm.weight, norm.epsilon)),
                _ => return false,
            },
            Op::SplitHeads { src, first, second, head_dim } if head_dim == width => {
                let own = first == self.q && Some(second) == self.gate && self.joined.is_none();
                if !own || [self.k, self.v].contains(&first) {
                    return false;
                }
                self.joined = Some(src);
            }
            _ => return false,
        }
        true
    }

    /// The plan for the heads of `buf`, as long as they lie there.
    fn heads(&mut self, buf: Buf) -> Option<&mut HeadPlan> {
        if buf == self.k && buf != self.q {
            Some(&mut self.k_plan)
        } else if buf == self.q && buf != self.k && self.joined.is_none() {
            Some(&mut self.q_plan)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hip::{Device, Driver};
    use crate::launch::Norm;

    const Q: Buf = Buf(1);
    const K: Buf = Buf(2);
    const V: Buf = Buf(3);
    const GATE: Buf = Buf(4);
    const JOINED: Buf = Buf(5);
    const DIM: usize = 64;

    fn bufs() -> AttentionBufs {
        let (q_plan, k_plan) = (HeadPlan::default(), HeadPlan::default());
        AttentionBufs { q: Q, k: K, v: V, gate: Some(GATE), dst: Buf(6), joined: None, q_plan, k_plan }
    }

    fn rope(buf: Buf) -> Op {
        Op::Rope { buf, head_dim: DIM, rope: 0 }
    }

    fn split() -> Op {
        Op::SplitHeads { src: JOINED, first: Q, second: GATE, head_dim: DIM }
    }

    /// What is absorbed, and how many operations are left.
    fn absorbed(mut ops: Vec<Op>, later: &[Step]) -> (AttentionBufs, usize) {
        let mut bufs = bufs();
        bufs.absorb(&mut ops, DIM, later);
        (bufs, ops.len())
    }

    /// The order that models with gated attention have.
    #[test]
    fn all_that_prepares_heads_is_absorbed() {
        let driver = Driver::open(&"emulated".parse().unwrap()).unwrap();
        let device = Device::open(&driver, 0).unwrap();
        let memory = device.allocate("norm", 4 * DIM).unwrap();
        let weight = memory.slice();
        let norm = |buf| Op::HeadNorm { buf, norm: Norm { weight, width: DIM, epsilon: 1e-6 } };
        let (bufs, left) = absorbed(vec![rope(V), split(), norm(Q), rope(Q), norm(K), rope(K)], &[]);
        assert_eq!((bufs.joined, left), (Some(JOINED), 1));
        let plan = HeadPlan { norm: Some((weight, 1e-6)), rope: Some(0) };
        assert_eq!((bufs.q_plan, bufs.k_plan), (plan, plan));
        // A norm after the rotation is another computation.
        let (bufs, left) = absorbed(vec![rope(Q), norm(Q), rope(K)], &[]);
        assert_eq!((bufs.q_plan, left), (HeadPlan { rope: None, ..plan }, 1));
    }

    #[test]
    fn what_changes_other_heads_stays() {
        for last in [
            rope(V),
            Op::Rope { buf: Q, head_dim: DIM / 2, rope: 0 },
            Op::SplitHeads { src: JOINED, first: GATE, second: Q, head_dim: DIM },
            Op::Residual { src: Q },
        ] {
            assert_eq!(absorbed(vec![last], &[]).1, 1);
        }
        assert_eq!(absorbed(vec![rope(Q), rope(Q)], &[]).1, 1, "turned twice");
        assert_eq!(absorbed(vec![rope(Q), split(), rope(K)], &[]).1, 1, "what the split overwrites");
    }

    /// Absorbed operations leave the buffers as they were, so they must not be read again.
    #[test]
    fn nothing_is_absorbed_when_heads_are_read_later() {
        for buf in [Q, K, GATE] {
            assert_eq!(absorbed(vec![rope(Q), rope(K)], &[Step::Residual { src: buf }]).1, 2);
        }
    }
}
