//! The pool of KV blocks: which ids are free. A block id means the same block on every stage.

/// Free block ids.
#[derive(Debug)]
pub(super) struct BlockPool {
    total: usize,
    /// Handed out from the end; starts so that low ids go first.
    free: Vec<u32>,
}

impl BlockPool {
    pub(super) fn new(total: usize) -> BlockPool {
        let ids = 0..u32::try_from(total).unwrap_or(u32::MAX);
        BlockPool { total: ids.len(), free: ids.rev().collect() }
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn used(&self) -> usize {
        self.total - self.free.len()
    }

    /// Extends `table` to `wanted` blocks, or shortens it; false, and nothing changed, when the pool is short.
    pub(super) fn resize(&mut self, table: &mut Vec<u32>, wanted: usize) -> bool {
        if wanted <= table.len() {
            self.free.extend(table.drain(wanted..).rev());
            return true;
        }
        let more = wanted - table.len();
        let Some(rest) = self.free.len().checked_sub(more) else { return false };
        table.extend(self.free.drain(rest..).rev());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_block_has_one_owner(total in 1u32..40, sizes in prop::collection::vec((0usize..4, 0usize..20), 1..60)) {
            let mut pool = BlockPool::new(total as usize);
            let mut tables = vec![Vec::new(); 4];
            for (owner, wanted) in sizes {
                let room = pool.free() + tables[owner].len();
                prop_assert_eq!(pool.resize(&mut tables[owner], wanted), wanted <= room);
                let mut all: Vec<u32> = tables.iter().flatten().copied().collect();
                prop_assert_eq!(all.len(), pool.used());
                all.extend(&pool.free);
                all.sort_unstable();
                prop_assert_eq!(all, (0..total).collect::<Vec<u32>>());
            }
        }
    }
}
