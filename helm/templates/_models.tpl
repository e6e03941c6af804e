{{/* The entry of `models` that a pool belongs to, as YAML: (root, name, for). */}}
{{- define "diptych.model" -}}
{{- $wanted := .name }}
{{- $known := list }}
{{- $found := dict }}
{{- range .root.Values.models }}
{{- $known = append $known .name }}
{{- if or (eq .name $wanted) (and (not $wanted) (eq (len $.root.Values.models) 1)) }}
{{- $found = . }}
{{- end }}
{{- end }}
{{- if not $found }}
{{- if $wanted }}
{{- fail (printf "%s names the model %q, but models has %s" .for $wanted (join ", " $known)) }}
{{- else }}
{{- fail (printf "%s must name its model, one of %s" .for (join ", " $known)) }}
{{- end }}
{{- end }}
{{- toYaml $found }}
{{- end }}

{{/* A pool with everything that `workers` and the role's defaults say, as YAML: (root, role, pool). */}}
{{- define "diptych.pool" -}}
{{- $role := index .root.Values .role }}
{{- $pool := mustMergeOverwrite (dict) (mustDeepCopy .root.Values.workers) (mustDeepCopy $role.defaults) (mustDeepCopy .pool) }}
{{- $model := include "diptych.model" (dict "root" .root "name" (.pool.model | default "") "for" (printf "%s pool %s" .role .pool.name)) | fromYaml }}
{{- $_ := set $pool "model" $model.name }}
{{- toYaml $pool }}
{{- end }}

{{/* The pools of a role, merged, as YAML {pools: [...]}; with a model only its own: (root, role, model). */}}
{{- define "diptych.pools" -}}
{{- $pools := list }}
{{- range (index .root.Values .role).pools }}
{{- $pool := include "diptych.pool" (dict "root" $.root "role" $.role "pool" .) | fromYaml }}
{{- if or (not $.model) (eq $pool.model $.model) }}
{{- $pools = append $pools $pool }}
{{- end }}
{{- end }}
{{- toYaml (dict "pools" $pools) }}
{{- end }}

{{/* "true" when a pool of the model may have no pod: (root, model). */}}
{{- define "diptych.scalesToZero" -}}
{{- range $role := list "prefill" "decode" }}
{{- range (include "diptych.pools" (dict "root" $.root "role" $role "model" $.model) | fromYaml).pools }}
{{- if and (has .autoscaling.type (list "keda" "planner")) (eq (int .autoscaling.minReplicas) 0) }}true{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses an update that could neither add a pod nor take one away: (spec, for). */}}
{{- define "diptych.checkStrategy" -}}
{{- if and (has (toString .spec.strategy.maxSurge) (list "0" "0%")) (has (toString .spec.strategy.maxUnavailable) (list "0" "0%")) }}
{{- fail (printf "%s: strategy.maxSurge and strategy.maxUnavailable are both 0, so no update could begin" .for) }}
{{- end }}
{{- end }}

{{/* Refuses what the schema cannot see. Rendered once, by the routers' template. */}}
{{- define "diptych.check" -}}
{{- $names := list }}
{{- range .Values.models }}
{{- if has .name $names }}{{ fail (printf "two models are called %s" .name) }}{{ end }}
{{- $names = append $names .name }}
{{- if not (include "diptych.pools" (dict "root" $ "role" "decode" "model" .name) | fromYaml).pools }}
{{- fail (printf "model %s has no decode pool: add one to decode.pools" .name) }}
{{- end }}
{{- if and (eq .source.type "image") (semverCompare "<1.33-0" $.Capabilities.KubeVersion.Version) }}
{{- fail (printf "model %s comes as an OCI image volume, which needs Kubernetes 1.33 (here %s); before 1.35 also the feature gate ImageVolume" .name $.Capabilities.KubeVersion.Version) }}
{{- end }}
{{- end }}
{{- range (include "diptych.routers" (dict "root" $) | fromYaml).routers }}
{{- include "diptych.checkStrategy" (dict "spec" .spec "for" .for) }}
{{- include "diptych.checkStore" (dict "router" .spec "for" .for) }}
{{- end }}
{{- include "diptych.checkShared" (dict "root" $) }}
{{- range $role := list "prefill" "decode" }}
{{- $pools := list }}
{{- range (include "diptych.pools" (dict "root" $ "role" $role) | fromYaml).pools }}
{{- include "diptych.checkStrategy" (dict "spec" . "for" (printf "%s pool %s" $role .name)) }}
{{- if has .name $pools }}{{ fail (printf "two %s pools are called %s" $role .name) }}{{ end }}
{{- $pools = append $pools .name }}
{{- end }}
{{- end }}
{{- if and .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled }}
{{- fail "monitoring.podMonitor and monitoring.serviceMonitor are both enabled: everything would be counted twice" }}
{{- end }}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) }}
{{- fail "tls.certManager.enabled needs tls.certManager.issuerRef.name" }}
{{- end }}
{{- end }}

{{/* One router's store is unknown to others, whose clients would find nothing: (router, for). */}}
{{- define "diptych.checkStore" -}}
{{- $store := .router.responseStore }}
{{- if ne $store.type "none" }}
{{- if or .router.autoscaling.enabled (gt (int .router.replicas) 1) }}
{{- fail (printf "%s: responseStore.type %s needs one replica and no autoscaling, because routers do not share what they store" .for $store.type) }}
{{- end }}
{{- if and (eq $store.type "claim") (not $store.claimName) }}
{{- fail (printf "%s: responseStore.type claim needs responseStore.claimName" .for) }}
{{- end }}
{{- end }}
{{- end }}
