//! How the first sandbox of a session started: from what, and how long each phase took. Pure.

use harvest_proto::{
    Event, EventBody,
    event::{BootPhase, PhaseStatus, StartWay},
};

use crate::printer::human_millis;

/// The events that `describe` looks at are among this many first ones.
pub(super) const EVENTS: u64 = 200;

/// `warm pool 9ms, agent 812ms, sync 210ms, ready after 1.1s`
pub(super) fn describe(events: &[Event]) -> Option<String> {
    let mut parts = Vec::new();
    let created = events.first()?.at;
    for event in events {
        match &event.body {
            EventBody::SandboxStarted { epoch: 1, way, millis, .. } => {
                parts.push(format!("{} {}", name(*way), human_millis(*millis)));
            }
            EventBody::BootPhase { phase: BootPhase::Ready, status: PhaseStatus::Done, .. } => {
                let millis = u64::try_from(event.at.since(created).as_millis()).ok()?;
                parts.push(format!("ready after {}", human_millis(millis)));
            }
            EventBody::BootPhase { phase, millis: Some(millis @ 1..), .. } => {
                parts.push(format!("{phase:?} {}", human_millis(*millis)).to_lowercase());
            }
            EventBody::SandboxEnded { .. } => break,
            _ => {}
        }
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

const fn name(way: StartWay) -> &'static str {
    match way {
        StartWay::Pool => "warm pool",
        StartWay::Build => "build",
        StartWay::Snapshot => "snapshot",
        StartWay::Image => "image",
    }
}

#[cfg(test)]
mod tests {
    use harvest_proto::{SandboxId, StateReason, Timestamp, api::SessionState};

    use super::*;

    fn event(at: i64, body: EventBody) -> Event {
        Event { seq: 1, at: Timestamp::from_millis(at), turn: None, body }
    }

    fn phase(at: i64, phase: BootPhase, millis: u64) -> Event {
        let (status, tail, failure) = (PhaseStatus::Done, None, None);
        event(at, EventBody::BootPhase { phase, status, millis: Some(millis), tail, failure })
    }

    #[test]
    fn phases_of_the_first_sandbox_are_named() {
        let (state, reason) = (SessionState::Queued, StateReason::Created);
        let sandbox = SandboxId::random();
        let started = |epoch, way| EventBody::SandboxStarted {
            sandbox: sandbox.clone(),
            epoch,
            from: "snp".into(),
            way,
            millis: 9,
        };
        let ended = EventBody::SandboxEnded { sandbox: sandbox.clone(), reason: "idle".into() };
        let events = [
            event(1000, EventBody::StateChanged { state, reason, detail: None }),
            event(1009, started(1, StartWay::Pool)),
            phase(1020, BootPhase::Starting, 0),
            phase(1100, BootPhase::Ready, 0),
            phase(1300, BootPhase::Sync, 210),
            event(1400, ended),
            event(1500, started(2, StartWay::Snapshot)),
        ];
        let shown = describe(&events).unwrap();
        assert_eq!(shown, "warm pool 9ms, ready after 100ms, sync 210ms");
        assert_eq!(describe(&events[..1]), None);
    }
}
