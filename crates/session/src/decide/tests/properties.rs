//! Properties that hold whatever happens.

use proptest::prelude::*;

use super::simulation::Simulation;
use crate::decide::*;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]
    #[test]
    fn every_prompt_ends_once_without_lost_work(
        events in proptest::collection::vec((any::<u8>(), any::<u16>()), 0..120),
    ) {
        let mut sim = Simulation::new();
        for (what, which) in events {
            sim.random_event(what, usize::from(which));
        }
        sim.settle();
    }

    #[test]
    fn terminate_always_ends_a_session(
        events in proptest::collection::vec((any::<u8>(), any::<u16>()), 0..80),
    ) {
        let mut sim = Simulation::new();
        for (what, which) in events {
            sim.random_event(what, usize::from(which));
        }
        sim.busy = false;
        // Twice: earlier failures may only be delivered now.
        for _ in 0..2 {
            if matches!(sim.state.sandbox, SandboxState::SaveUnknown { .. }) {
                sim.input(Input::Resume);
            }
            sim.input(Input::Terminate);
            while sim.quiet_step() {}
        }
        prop_assert_eq!(&sim.state.sandbox, &SandboxState::Absent);
        let ended = [SessionState::Paused, SessionState::Archived];
        prop_assert!(ended.contains(&sim.state.public.state), "{:?}", sim.state.public);
    }
}
