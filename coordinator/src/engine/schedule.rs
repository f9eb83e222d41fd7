//! Which tokens go into the next step: a decode token of every sequence that has one, and prompt tokens in what room is
//! left, shared evenly.

/// A sequence that has tokens to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ready {
    pub slot: usize,
    /// Tokens not yet sent.
    pub pending: usize,
    /// Whether it is generating: its one token must not wait behind prompts.
    pub decoding: bool,
    /// Whether layers are lifted for its next tokens.
    pub lifted: bool,
    /// Most prompt tokens it wants in one step.
    pub chunk: usize,
}

/// Sizes that bound a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Budget {
    /// Tokens of a step.
    pub step: usize,
    /// Prompt tokens in a step that also decodes: a long prompt must not make the answers of others stutter.
    pub prefill_beside_decode: usize,
    /// Decode tokens of a step, so that steps in flight at the same time have something to do.
    pub decode: usize,
}

/// Fills `out` with `(slot, tokens)`, those for which layers are lifted last. `turn` rotates who comes first when there is not room for all.
pub(super) fn choose(ready: &[Ready], budget: &Budget, turn: usize, out: &mut Vec<(usize, usize)>) {
    out.clear();
    let from_turn = || ready.iter().cycle().skip(turn % ready.len().max(1)).take(ready.len());
    let decoding = from_turn().filter(|sequence| sequence.decoding && sequence.pending > 0);
    out.extend(decoding.take(budget.decode.min(budget.step)).map(|sequence| (sequence.slot, 1)));

    let mut room = budget.step - out.len();
    if !out.is_empty() {
        room = room.min(budget.prefill_beside_decode);
    }
    let prompts = || from_turn().filter(|sequence| !sequence.decoding && sequence.pending > 0);
    let mut waiting = prompts().count();
    for sequence in prompts() {
        // An even share of what is left; who needs less leaves more to those behind. Rounded up, so that the first ones
        // get a token even when there are more prompts than room.
        let share = room.div_ceil(waiting);
        let tokens = sequence.pending.min(share).min(sequence.chunk);
        if tokens > 0 {
            out.push((sequence.slot, tokens));
        }
        room -= tokens;
        waiting -= 1;
    }
    let is_lifted = |slot: usize| ready.iter().any(|sequence| sequence.slot == slot && sequence.lifted);
    out.sort_by_key(|(slot, _)| is_lifted(*slot));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ready(slot: usize, pending: usize, decoding: bool) -> Ready {
        Ready { slot, pending, decoding, lifted: false, chunk: usize::MAX }
    }

    fn pick(ready: &[Ready], step: usize, turn: usize) -> Vec<(usize, usize)> {
        let mut out = Vec::new();
        choose(ready, &Budget { step, prefill_beside_decode: 8, decode: usize::MAX }, turn, &mut out);
        out
    }

    #[test]
    fn a_lone_prompt_gets_the_whole_step() {
        assert_eq!(pick(&[ready(3, 100, false)], 64, 0), vec![(3, 64)]);
        assert_eq!(pick(&[ready(3, 40, false)], 64, 0), vec![(3, 40)]);
    }

    #[test]
    fn decoding_comes_first_and_bounds_prompts_beside_it() {
        let all = [ready(0, 100, false), ready(1, 1, true), ready(2, 1, true)];
        assert_eq!(pick(&all, 64, 0), vec![(1, 1), (2, 1), (0, 8)]);
    }

    #[test]
    fn prompts_share_evenly_and_leave_what_they_do_not_need() {
        let all = [ready(0, 2, false), ready(1, 100, false), ready(2, 100, false)];
        assert_eq!(pick(&all, 32, 0), vec![(0, 2), (1, 15), (2, 15)]);
    }

    #[test]
    fn a_sequence_that_waits_for_its_token_is_left_out() {
        assert_eq!(pick(&[ready(0, 0, true)], 8, 0), vec![]);
    }

    prop_compose! {
        fn any_ready()(all in prop::collection::vec((0usize..50, any::<bool>(), 1usize..40), 0..20)) -> Vec<Ready> {
            all.into_iter().enumerate().map(|(slot, (pending, decoding, chunk))| {
                Ready { slot, pending, decoding, lifted: slot % 3 == 0, chunk }
            }).collect()
        }
    }

    proptest! {
        #[test]
        fn steps_keep_to_their_budget_and_nobody_starves(
            all in any_ready(), step in 1usize..64, prefill_beside_decode in 1usize..16, decode in 1usize..8,
        ) {
            let budget = Budget { step, prefill_beside_decode, decode };
            let mut out = Vec::new();
            let mut served = vec![false; all.len()];
            for turn in 0..all.len().max(1) {
                choose(&all, &budget, turn, &mut out);
                prop_assert!(out.iter().map(|(_, tokens)| tokens).sum::<usize>() <= step);
                for &(slot, tokens) in &out {
                    prop_assert!(tokens >= 1 && tokens <= all[slot].pending);
                    prop_assert!(tokens == 1 || !all[slot].decoding && tokens <= all[slot].chunk);
                    served[slot] = true;
                }
                prop_assert!(out.is_sorted_by_key(|(slot, _)| all[*slot].lifted));
                let mut slots: Vec<usize> = out.iter().map(|(slot, _)| *slot).collect();
                slots.sort_unstable();
                slots.dedup();
                prop_assert_eq!(slots.len(), out.len(), "one span per sequence");
            }
            let decoders = all.iter().any(|sequence| sequence.decoding && sequence.pending > 0);
            for sequence in &all {
                // Prompts may wait while decoding fills whole steps, never for another reason.
                let must = sequence.pending > 0 && (sequence.decoding || !decoders);
                prop_assert!(!must || served[sequence.slot]);
            }
        }
    }
}
