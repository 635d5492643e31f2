//! Actions for the Services of the whole cluster and of each member. The annotation `started` on a member's Service
//! records that a pod of the member may exist.

use api::names;
use k8s_openapi::api::core::v1;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::patches::merge;
use super::{Builder, Event, action};
use crate::action::{Action, Kind, Object, Patch, Request, StartPart};
use crate::plan::diff;
use crate::reason::Reason;
use crate::snapshot::Service;

impl Builder<'_> {
    pub(crate) fn apply_headless_service(&self) -> Action {
        apply(
            "before-apply-headless",
            self.of_formed(Reason::HeadlessServiceApplied),
            "apply the headless Service",
            member::headless_service(&self.members()),
        )
    }

    /// Applies the client Service. `open`: the Service gets endpoints, so clients can connect.
    pub(crate) fn apply_client_service(&self, open: bool) -> Action {
        let (reason, text) = if open {
            (
                Reason::ClientServiceOpened,
                "apply the client Service with endpoints, so that clients can connect",
            )
        } else {
            (
                Reason::ClientServiceApplied,
                "apply the client Service without endpoints",
            )
        };
        apply(
            "before-apply-client",
            self.of_formed(reason),
            text,
            diff::client_service(&self.members(), open),
        )
    }

    /// Creates the Service of a new member, without an Event, because the Event `MemberStarted` reports the member.
    /// `started`: the Service has the annotation `started`. `closed`: the Service gets no endpoints yet.
    pub(crate) fn create_service(&self, member: &str, started: bool, closed: bool) -> Action {
        let service = member::member_service(&self.members(), member);
        let mut service = member::without_second_port(service);
        if closed {
            service = member::closed(service);
        }
        if started {
            let annotations = service.annotations_mut();
            annotations.insert(names::ANNOTATION_STARTED.to_owned(), "true".to_owned());
        }
        Action {
            start: started.then(|| StartPart::Mark(member.to_owned())),
            ..action(
                "before-create-service",
                None,
                format!("create the Service of {member}"),
                Request::Create(Object::Service(Box::new(service))),
            )
        }
    }

    /// Gives the Service of a member its endpoints, so that the other members can reach the member.
    pub(crate) fn open_service(&self, member: &str, uid: &str) -> Action {
        apply(
            "before-open-service",
            None,
            format!("apply the Service of {member} with endpoints"),
            self.member_service(member, uid),
        )
    }

    /// Applies the Service of a member, because the existing Service differs from the desired Service.
    pub(crate) fn repair_service(&self, member: &str, uid: &str) -> Action {
        apply(
            "before-repair-service",
            Some((Reason::ServiceRepaired, "Repair")),
            format!("repair the Service of {member}"),
            self.member_service(member, uid),
        )
    }

    /// Builds a member's Service with the UID of the observed Service, so that the request fails if the Service was
    /// deleted. The operator must not create the Service again, because the member's name must not be used again.
    fn member_service(&self, member: &str, uid: &str) -> v1::Service {
        let mut service = member::member_service(&self.members(), member);
        service.metadata.uid = Some(uid.to_owned());
        service
    }

    /// Renews the annotation `started` that another operator process has set. The renewal changes the resourceVersion,
    /// so the other process can no longer remove the annotation. The new value is unique, because a patch without a
    /// change would keep the resourceVersion.
    pub(crate) fn mark_service_again(&self, member: &str, service: &Service) -> Action {
        let mark = json!(self.now.to_string());
        Action {
            start: Some(StartPart::MarkAgain(member.to_owned())),
            ..action(
                "before-mark-service",
                None,
                format!("record again on the Service of {member} that the member may have a pod"),
                Request::Patch(marked(member, &mark, &service.resource_version)),
            )
        }
    }
}

/// Sets the annotation `started` on the member's Service.
pub(crate) fn mark_service(member: &str, service: &Service) -> Action {
    Action {
        start: Some(StartPart::Mark(member.to_owned())),
        ..action(
            "before-mark-service",
            None,
            format!("record on the Service of {member} that the member may have a pod"),
            Request::Patch(marked(member, &json!("true"), &service.resource_version)),
        )
    }
}

/// Removes the annotation `started`. `version`: the resourceVersion of the Service, as precondition.
pub(crate) fn unmark(member: &str, version: &str) -> Patch {
    marked(member, &Value::Null, version)
}

fn marked(member: &str, mark: &Value, version: &str) -> Patch {
    let metadata = json!({
        "annotations": { names::ANNOTATION_STARTED: mark },
        "resourceVersion": version,
    });
    merge(Kind::Service, member, &metadata)
}

fn apply(
    point: &'static str,
    event: Event,
    text: impl Into<String>,
    service: v1::Service,
) -> Action {
    action(
        point,
        event,
        text,
        Request::Apply(Object::Service(Box::new(service))),
    )
}
