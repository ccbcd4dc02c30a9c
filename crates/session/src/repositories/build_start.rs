//! What a build starts from, and which builds are kept. Pure.

use harvest_proto::{
    BranchName, ImageId, SnapshotId,
    api::{Build, BuildStatus, BuildSummary},
};

/// Each rebuild adds a layer, and what it replaces stays below it.
const MAX_LAYERS: u32 = 8;

/// Builds of a branch that are kept: a session may be about to start from the second newest.
const KEPT_BUILDS: usize = 2;

/// Branches besides the base whose builds are kept.
const KEPT_BRANCHES: usize = 5;

/// An image as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CurrentImage {
    pub(super) name: String,
    /// `None` where the provider has no images of its own.
    pub(super) id: Option<ImageId>,
}

/// Why a build begins with the image; `None` when it continues the last one.
pub(super) fn why_from_image(
    last: Option<&Build>,
    image: &CurrentImage,
    (force, failed): (bool, bool),
) -> Option<String> {
    let Some(last) = last else { return Some("there is no earlier build".to_owned()) };
    let is_same = (&last.image, &last.image_id) == (&image.name, &image.id);
    match is_same {
        _ if force => Some("asked to".to_owned()),
        // What the earlier build left may be the reason.
        _ if failed => Some("the last attempt failed".to_owned()),
        false => Some(format!("the image {} is another one than before", image.name)),
        true if last.layers >= MAX_LAYERS => {
            Some(format!("{MAX_LAYERS} builds lie on top of each other"))
        }
        true => None,
    }
}

/// Whether the newest build of a branch that has ended failed, of builds listed newest first.
pub(super) fn has_failed(builds: &[BuildSummary], branch: Option<&BranchName>) -> bool {
    let mut ended = builds.iter().filter(|build| build.branch.as_ref() == branch);
    let newest = ended.find(|build| build.status != BuildStatus::Building);
    newest.is_some_and(|build| build.status == BuildStatus::Failed)
}

/// The successful builds that are no longer kept, of builds listed newest first.
pub(super) fn outdated(builds: &[BuildSummary]) -> Vec<SnapshotId> {
    let mut kept: Vec<(Option<&BranchName>, usize)> = Vec::new();
    let mut outdated = Vec::new();
    for build in builds.iter().filter(|build| build.status == BuildStatus::Ready) {
        let branch = build.branch.as_ref();
        let branches = kept.iter().filter(|(branch, _)| branch.is_some()).count();
        match kept.iter_mut().find(|(known, _)| *known == branch) {
            Some((_, count)) if *count < KEPT_BUILDS => *count += 1,
            None if branch.is_none() || branches < KEPT_BRANCHES => kept.push((branch, 1)),
            _ => outdated.push(build.snapshot_id.clone()),
        }
    }
    outdated
}

#[cfg(test)]
mod tests {
    use harvest_proto::Timestamp;

    use super::*;

    fn build(layers: u32, image: &CurrentImage) -> Build {
        Build {
            snapshot_id: SnapshotId::random(),
            provider: "local".into(),
            commit: "c".into(),
            branch: None,
            image: image.name.clone(),
            image_id: image.id.clone(),
            layers,
            package_manager: None,
            check: None,
            config: None,
            millis: 1,
            built_at: Timestamp::from_millis(0),
        }
    }

    #[test]
    fn ninth_build_begins_with_the_image() {
        let image = CurrentImage { name: "agents".into(), id: Some(ImageId::random()) };
        let (mut last, mut from_image) = (None, Vec::new());
        for number in 1..=18 {
            let layers = match (&last, why_from_image(last.as_ref(), &image, (false, false))) {
                (Some(Build { layers, .. }), None) => layers + 1,
                _ => {
                    from_image.push(number);
                    1
                }
            };
            assert!(layers <= MAX_LAYERS);
            last = Some(build(layers, &image));
        }
        assert_eq!(from_image, [1, 9, 17]);
    }

    #[test]
    fn other_image_or_force_begins_with_the_image() {
        let image = CurrentImage { name: "agents".into(), id: Some(ImageId::random()) };
        let last = build(1, &image);
        let why = |image: &CurrentImage, force| why_from_image(Some(&last), image, (force, false));
        assert_eq!(why(&image, false), None);
        assert!(why_from_image(Some(&last), &image, (false, true)).is_some());
        assert!(why(&image, true).is_some());
        let rebuilt = CurrentImage { id: Some(ImageId::random()), ..image.clone() };
        assert!(why(&rebuilt, false).unwrap().contains("agents"));
        assert!(why(&CurrentImage { name: "base".into(), ..image }, false).is_some());
    }

    #[test]
    fn two_builds_of_each_recent_branch_are_kept() {
        let summary = |branch: &str, status| BuildSummary {
            snapshot_id: SnapshotId::random(),
            status,
            commit: None,
            branch: branch.parse().ok(),
            package_manager: None,
            error: None,
            millis: None,
            started_at: Timestamp::from_millis(0),
            ended_at: None,
        };
        let ready = |branch: &str| summary(branch, BuildStatus::Ready);
        assert!(has_failed(
            &[summary("", BuildStatus::Building), summary("", BuildStatus::Failed)],
            None
        ));
        assert!(!has_failed(&[ready(""), summary("", BuildStatus::Failed)], None));
        let mut builds = vec![ready(""), ready("a"), ready(""), ready(""), ready("a"), ready("a")];
        builds.push(summary("", BuildStatus::Building));
        builds.extend(["b", "c", "d", "e", "f"].map(ready));
        let expected: Vec<_> =
            [3, 5, 11].map(|index: usize| builds[index].snapshot_id.clone()).into();
        assert_eq!(outdated(&builds), expected);
    }
}
