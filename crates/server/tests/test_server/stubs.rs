//! No doors, and a forge without repositories.

use std::{any::Any, sync::Arc};

use harvest_forge::{GitHub, GitHubSettings};
use harvest_gateway::{
    DoorListener, DoorObserver,
    ledger::{DoorPolicy, Tools},
};
use harvest_proto::Secret;
use harvest_session::Doors;

pub(super) struct Stubs;

impl Doors for Stubs {
    fn open(
        &self,
        _: Box<dyn DoorListener>,
        _: DoorPolicy,
        _: Option<DoorObserver>,
        _: Option<Arc<dyn Tools>>,
    ) -> Box<dyn Any + Send> {
        Box::new(())
    }
}

/// A forge without repositories, whose webhooks have this secret.
pub(super) fn forge() -> GitHub {
    let webhook_secret = Some(Secret::new(WEBHOOK_SECRET.to_owned()));
    GitHub::new(GitHubSettings { webhook_secret, ..GitHubSettings::new("https://github.invalid") })
        .unwrap()
}

pub(crate) const WEBHOOK_SECRET: &str = "webh00k-s3cret";
