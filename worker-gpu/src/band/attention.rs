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
            Op::HeadNorm { buf, head_dim, weight, eps } if head_dim == width => match self.heads(buf) {
                Some(plan @ HeadPlan { norm: None, .. }) => plan.norm = Some((weight, eps)),
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
