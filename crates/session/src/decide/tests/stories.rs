//! The promises whatever happens.

use proptest::prelude::*;

use super::world::World;
use crate::decide::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_every_prompt_ends_once_and_no_work_is_lost(
        story in proptest::collection::vec((any::<u8>(), any::<u16>()), 0..120),
    ) {
        let mut world = World::new();
        for (what, which) in story {
            world.happen(what, usize::from(which));
        }
        world.settle();
    }

    #[test]
    fn whatever_happened_a_session_can_be_ended(
        story in proptest::collection::vec((any::<u8>(), any::<u16>()), 0..80),
    ) {
        let mut world = World::new();
        for (what, which) in story {
            world.happen(what, usize::from(which));
        }
        world.busy = false;
        // Twice, because what went wrong before may only be heard now.
        for _ in 0..2 {
            if matches!(world.state.machine, Machine::Held { .. }) {
                world.input(Input::Resume);
            }
            world.input(Input::Terminate);
            while world.calm_step() {}
        }
        prop_assert_eq!(&world.state.machine, &Machine::Absent);
        let resting = [SessionState::Paused, SessionState::Archived].contains(&world.state.shown.state);
        prop_assert!(resting, "{:?}", world.state.shown);
    }
}
