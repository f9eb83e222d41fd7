//! State slots: where a sequence's recurrent state and KV blocks live, and which tokens they hold.
//!
//! A finished sequence leaves its tokens in the slot. A later request that begins with them continues there: a model
//! whose layers all attend can go on from any shared prefix, because positions beyond it are simply written again; a
//! model with recurrent layers only from the exact end, because its state cannot be wound back. Idle slots lose their
//! tokens, the longest unused first, when others need the slot or its blocks.

use super::blocks::BlockPool;
use super::lifts::Lifts;
use spillway_protocol::plan::KV_BLOCK_TOKENS;

/// One slot.
#[derive(Debug, Default)]
struct Slot {
    /// Tokens whose keys, values and state the workers hold.
    log: Vec<u32>,
    /// Which of them layers were lifted for.
    lifts: Lifts,
    /// KV blocks in order of positions.
    blocks: Vec<u32>,
    busy: bool,
    /// When it was last released, in releases since the start.
    released: u64,
}

/// All slots and the block pool.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    pool: BlockPool,
    /// Whether a sequence can continue from the middle of a log.
    rewindable: bool,
    releases: u64,
}

/// Which tokens that a slot holds a sequence may continue from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reuse<'a> {
    /// None: it starts afresh.
    Nothing,
    /// Those that were run with layers lifted for the same ones: for a sequence that goes on as it began.
    AsRun(&'a Lifts),
    /// Any.
    Any,
}

/// A slot that was claimed for a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub slot: usize,
    /// Tokens of the prompt that the slot already holds.
    pub cached: usize,
}

impl Slots {
    pub(super) fn new(slots: usize, kv_blocks: usize, rewindable: bool) -> Slots {
        let slots = (0..slots).map(|_| Slot::default()).collect();
        Slots { slots, pool: BlockPool::new(kv_blocks), rewindable, releases: 0 }
    }

    /// Whether a sequence can continue from the middle of a log.
    pub(super) fn rewindable(&self) -> bool {
        self.rewindable
    }

    /// Claims a slot with blocks for `length` tokens, or nothing while slots or blocks are short. The last prompt token is
    /// never cached: it has to run to give logits.
    pub(super) fn claim(&mut self, prompt: &[u32], length: usize, reuse: Reuse<'_>) -> Option<Claim> {
        let wanted = length.div_ceil(KV_BLOCK_TOKENS);
        let (slot, cached) = self.best_idle(prompt, reuse)?;
        let held: usize = self.idle().map(|slot| slot.blocks.len()).sum();
        if wanted > self.pool.free() + held {
            return None;
        }
        self.slots[slot].busy = true;
        self.slots[slot].log.truncate(cached);
        self.slots[slot].lifts.truncate(cached);
        self.make_room(wanted.saturating_sub(self.slots[slot].blocks.len()));
        self.pool.resize(&mut self.slots[slot].blocks, wanted);
        Some(Claim { slot, cached })
    }

    /// What layers were lifted for of the tokens that a slot holds.
    pub(super) fn lifts(&self, slot: usize) -> &Lifts {
        &self.slots[slot].lifts
    }

    /// Gives a slot back; `log` are the tokens that every stage has run, with layers lifted for `lifts`.
    pub(super) fn release(&mut self, slot: usize, log: &[u32], lifts: &Lifts) {
        self.releases += 1;
        let slot = &mut self.slots[slot];
        slot.log.clear();
        slot.log.extend_from_slice(log);
        slot.lifts.clone_from(lifts);
        slot.lifts.truncate(log.len());
        slot.busy = false;
        slot.released = self.releases;
        // Blocks that were reserved for an answer that ended early are of no use to anyone now.
        let filled = log.len().div_ceil(KV_BLOCK_TOKENS).min(slot.blocks.len());
        self.pool.resize(&mut slot.blocks, filled);
    }

    /// The block table of a claimed slot up to `end` tokens.
    pub(super) fn blocks(&self, slot: usize, end: usize) -> &[u32] {
        let table = &self.slots[slot].blocks;
        &table[..end.div_ceil(KV_BLOCK_TOKENS).min(table.len())]
    }

    /// Forgets what idle slots hold.
    pub(super) fn forget(&mut self) {
        for slot in self.slots.iter_mut().filter(|slot| !slot.busy) {
            slot.log.clear();
            self.pool.resize(&mut slot.blocks, 0);
        }
    }

    /// Blocks of busy slots.
    pub(super) fn blocks_used(&self) -> usize {
        self.pool.used() - self.idle().map(|slot| slot.blocks.len()).sum::<usize>()
    }

    fn idle(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(|slot| !slot.busy)
    }

    /// The idle slot that saves the most work; among equals the one unused for longest, so that useful logs survive.
    fn best_idle(&self, prompt: &[u32], reuse: Reuse<'_>) -> Option<(usize, usize)> {
        let cached = |slot: &Slot| match reuse {
            Reuse::Nothing => 0,
            Reuse::AsRun(lifts) => self.reusable(slot, prompt, slot.lifts.agree_until(lifts)),
            Reuse::Any => self.reusable(slot, prompt, usize::MAX),
        };
        let idle = self.slots.iter().enumerate().filter(|(_, slot)| !slot.busy);
        let rated = idle.map(|(index, slot)| (index, cached(slot), slot));
        let best =
            rated.max_by_key(|(_, cached, slot)| (*cached, slot.log.is_empty(), u64::MAX - slot.released));
        best.map(|(index, cached, _)| (index, cached))
    }

    /// Tokens of a slot, at most `most`, that `prompt` begins with and can continue from.
    fn reusable(&self, slot: &Slot, prompt: &[u32], most: usize) -> usize {
        let last = prompt.len().saturating_sub(1).min(most);
        let shared = slot.log.iter().zip(&prompt[..last]).take_while(|(a, b)| a == b).count();
        if self.rewindable || shared == slot.log.len() { shared } else { 0 }
    }

    /// Takes blocks from idle slots, the longest unused first, until `more` are free.
    fn make_room(&mut self, more: usize) {
        while self.pool.free() < more {
            let idle = self.slots.iter_mut().filter(|slot| !slot.busy && !slot.blocks.is_empty());
            let Some(oldest) = idle.min_by_key(|slot| slot.released) else { return };
            oldest.log.clear();
            self.pool.resize(&mut oldest.blocks, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: usize = KV_BLOCK_TOKENS;

    fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
        range.collect()
    }

    #[test]
    fn a_sequence_reserves_everything_it_may_need() {
        let mut slots = Slots::new(4, 5, true);
        let first = slots.claim(&[1], 3 * B, Reuse::Any).unwrap();
        assert_eq!(slots.blocks(first.slot, 3 * B).len(), 3);
        assert_eq!(slots.blocks(first.slot, B + 1).len(), 2, "a table reaches to the last token");
        assert_eq!(slots.claim(&[1], 3 * B, Reuse::Any), None, "two blocks are left");
        assert!(slots.claim(&[1], 2 * B, Reuse::Any).is_some());
        slots.release(first.slot, &[1], &Lifts::default());
        assert_eq!(slots.blocks_used(), 2, "blocks of idle slots are not in use");
        assert!(slots.claim(&[9], 3 * B, Reuse::Any).is_some(), "and can be taken");
    }

    #[test]
    fn slots_run_out() {
        let mut slots = Slots::new(2, 100, true);
        assert!(slots.claim(&[1], 1, Reuse::Any).is_some() && slots.claim(&[1], 1, Reuse::Any).is_some());
        assert_eq!(slots.claim(&[1], 1, Reuse::Any), None);
    }

    #[test]
    fn an_attending_model_continues_from_any_shared_prefix() {
        let mut slots = Slots::new(2, 100, true);
        let first = slots.claim(&tokens(0..50), 60, Reuse::Any).unwrap();
        slots.release(first.slot, &tokens(0..55), &Lifts::default());
        let same = slots.claim(&tokens(0..50), 60, Reuse::Any).unwrap();
        assert_eq!(same, Claim { slot: first.slot, cached: 49 }, "the last prompt token runs again");
        slots.release(same.slot, &tokens(0..55), &Lifts::default());
        let mut other = tokens(0..20);
        other.extend([999, 998]);
        assert_eq!(slots.claim(&other, 60, Reuse::Any).unwrap().cached, 20);
    }

    #[test]
    fn a_recurrent_model_continues_only_from_the_exact_end() {
        let mut slots = Slots::new(2, 100, false);
        let first = slots.claim(&tokens(0..10), 60, Reuse::Any).unwrap();
        slots.release(first.slot, &tokens(0..12), &Lifts::default());
        assert_eq!(slots.claim(&tokens(0..11), 60, Reuse::Any).unwrap().cached, 0, "would have to go back");
        assert_eq!(
            slots.claim(&tokens(0..13), 60, Reuse::Any).unwrap(),
            Claim { slot: first.slot, cached: 12 }
        );
    }

    #[test]
    fn reuse_can_be_declined() {
        let mut slots = Slots::new(1, 100, true);
        let first = slots.claim(&tokens(0..10), 60, Reuse::Any).unwrap();
        slots.release(first.slot, &tokens(0..10), &Lifts::default());
        assert_eq!(slots.claim(&tokens(0..10), 60, Reuse::Nothing).unwrap().cached, 0);
    }

    #[test]
    fn the_longest_unused_log_goes_first() {
        let mut slots = Slots::new(2, 100, true);
        let old = slots.claim(&tokens(0..10), 20, Reuse::Any).unwrap();
        let new = slots.claim(&tokens(100..110), 20, Reuse::Any).unwrap();
        slots.release(old.slot, &tokens(0..10), &Lifts::default());
        slots.release(new.slot, &tokens(100..110), &Lifts::default());
        let stranger = slots.claim(&tokens(500..510), 20, Reuse::Any).unwrap();
        assert_eq!(stranger, Claim { slot: old.slot, cached: 0 });
        assert_eq!(
            slots.claim(&tokens(100..110), 20, Reuse::Any).unwrap(),
            Claim { slot: new.slot, cached: 9 }
        );
    }

    #[test]
    fn forgetting_frees_the_blocks() {
        let mut slots = Slots::new(1, 4, true);
        let claim = slots.claim(&tokens(0..40), 64, Reuse::Any).unwrap();
        slots.release(claim.slot, &tokens(0..40), &Lifts::default());
        slots.forget();
        assert_eq!(slots.pool.free(), 4);
        assert_eq!(slots.claim(&tokens(0..40), 64, Reuse::Any).unwrap().cached, 0);
    }
}
