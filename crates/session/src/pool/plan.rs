//! Which sandboxes of the pool end, and which are started. Pure.

use std::collections::BTreeMap;

use harvest_proto::{SessionId, Timestamp};

/// A member as the plan sees it.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) session: SessionId,
    pub(super) spec: String,
    pub(super) created_at: Timestamp,
    pub(super) failed: bool,
    /// A user has asked for it and will take it soon.
    pub(super) reserved: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) end: Vec<SessionId>,
    /// What further members are started with, one entry for each.
    pub(super) start: Vec<String>,
}

/// Plans for `wanted` members of each specification, none of them older than `oldest`.
pub(super) fn plan(
    mut members: Vec<Known>,
    wanted: &BTreeMap<String, usize>,
    oldest: Timestamp,
    memory_is_short: bool,
) -> Plan {
    // The newest stay.
    members.sort_by_key(|member| std::cmp::Reverse(member.created_at));
    let (mut plan, mut missing) = (Plan::default(), wanted.clone());
    for member in members {
        if member.failed || memory_is_short || member.created_at < oldest {
            plan.end.push(member.session);
            continue;
        }
        match missing.get_mut(&member.spec).filter(|missing| **missing > 0) {
            Some(missing) => *missing -= 1,
            None if member.reserved => {}
            None => plan.end.push(member.session),
        }
    }
    if !memory_is_short {
        for (spec, missing) in missing {
            plan.start.extend(std::iter::repeat_n(spec, missing));
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn member(spec: &str, created_at: i64) -> Known {
        Known {
            session: SessionId::random(),
            spec: spec.to_owned(),
            created_at: Timestamp::from_millis(created_at),
            failed: false,
            reserved: false,
        }
    }

    fn wanted(specs: &[(&str, usize)]) -> BTreeMap<String, usize> {
        specs.iter().map(|(spec, count)| ((*spec).to_owned(), *count)).collect()
    }

    fn of(members: &[Known], wanted: &BTreeMap<String, usize>) -> Plan {
        plan(members.to_vec(), wanted, Timestamp::from_millis(10), false)
    }

    #[test]
    fn outdated_members_are_replaced() {
        let (old_build, new_build) = (member("old", 20), member("new", 20));
        let planned = of(&[old_build.clone(), new_build], &wanted(&[("new", 2), ("other", 1)]));
        assert_eq!(planned.end, [old_build.session]);
        assert_eq!(planned.start, ["new", "other"]);
        let aged = member("new", 9);
        let planned = of(std::slice::from_ref(&aged), &wanted(&[("new", 1)]));
        assert_eq!((planned.end, planned.start), (vec![aged.session], vec!["new".to_owned()]));
    }

    #[test]
    fn reserved_member_stays_beyond_the_number() {
        let reserved = Known { reserved: true, ..member("a", 20) };
        assert_eq!(of(std::slice::from_ref(&reserved), &wanted(&[])), Plan::default());
        let failed = Known { failed: true, ..reserved };
        assert_eq!(of(std::slice::from_ref(&failed), &wanted(&[])).end, [failed.session]);
    }

    #[test]
    fn short_memory_ends_all_and_starts_none() {
        let all = [member("a", 20), Known { reserved: true, ..member("a", 20) }];
        let planned = plan(all.to_vec(), &wanted(&[("a", 4)]), Timestamp::from_millis(0), true);
        assert_eq!((planned.end.len(), planned.start.len()), (2, 0));
    }

    proptest! {
        #[test]
        fn plan_leads_to_the_wanted_number(
            members in proptest::collection::vec((0u8..3, 0i64..30, any::<bool>()), 0..12),
            counts in proptest::collection::vec(0usize..3, 3),
        ) {
            let name = |spec: u8| format!("spec{spec}");
            let known: Vec<Known> = members
                .iter()
                .map(|(spec, at, failed)| Known { failed: *failed, ..member(&name(*spec), *at) })
                .collect();
            let wanted: BTreeMap<String, usize> =
                (0u8..).zip(&counts).map(|(spec, count)| (name(spec), *count)).collect();
            let Plan { end, start } = of(&known, &wanted);
            let mut after: BTreeMap<String, usize> = BTreeMap::new();
            let stay = known.iter().filter(|member| !end.contains(&member.session));
            for spec in stay.map(|member| &member.spec).chain(&start) {
                *after.entry(spec.clone()).or_default() += 1;
            }
            let wanted: BTreeMap<String, usize> =
                wanted.into_iter().filter(|(_, count)| *count > 0).collect();
            prop_assert_eq!(after, wanted);
        }
    }
}
